"""A classifier for scikit-learn that learns new classes from single examples; it needs the extra ``[sklearn]``."""

try:
    import sklearn  # noqa: F401
except ImportError as error:
    raise ImportError(
        "hebbian_softmax.sklearn needs scikit-learn: pip install 'hebbian-softmax[sklearn]'", name=error.name
    ) from error

from hebbian_softmax.sklearn.classifier import HebbianClassifier

__all__ = ["HebbianClassifier"]
