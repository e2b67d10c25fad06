"""New classes in a trained classifier: intents of CLINC150 on a frozen sentence encoder, and other features."""
