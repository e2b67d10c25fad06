"""The documentation site: what its pages must have, and how docs/hooks.py makes them."""

import functools
import http.server
import importlib.util
import inspect
import logging
import os
import pydoc
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import hebbian_softmax
from hebbian_softmax import loss, memory, optim, sklearn
from tests import ROOT
from tests.browser import open_chromium

PUBLIC = (hebbian_softmax, loss, memory, optim, sklearn)
NAMES = {f"{module.__name__}.{name}": getattr(module, name) for module in PUBLIC for name in module.__all__}


@functools.cache
def loaded(file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(file).stem, ROOT / file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def to_markdown(text: str) -> str:
    return str(loaded("docs/hooks.py").to_markdown(inspect.cleandoc(text), lambda name: f"full.{name}"))


def test_the_reference_has_every_public_name() -> None:
    pages = "\n".join(page.read_text() for page in ROOT.glob("docs/api/*.md"))
    described = [pydoc.locate(name) for name in re.findall(r"^::: (\S+)", pages, flags=re.MULTILINE)]
    assert None not in described
    missing = [name for name, each in NAMES.items() if not any(each is other for other in described)]
    assert not missing, f"docs/api/ lacks {missing}"
    index = (ROOT / "docs/api/index.md").read_text()
    assert not [name for name in NAMES if f"`{name.rpartition('.')[2]}`" not in index]


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_has_an_example(name: str) -> None:
    assert ">>> " in (NAMES[name].__doc__ or "")


def public_docstrings() -> Iterator[tuple[str, str]]:
    for name, each in NAMES.items():
        yield name, inspect.getdoc(each) or ""
        for member, value in vars(each).items() if inspect.isclass(each) else ():
            ours = not str(getattr(value, "__module__", "")).startswith("sklearn")  # which adds methods to a class
            if ours and not member.startswith("_") and (found := inspect.getdoc(value)):
                yield f"{name}.{member}", found


def test_no_rest_is_left_in_docstrings() -> None:
    for name, text in public_docstrings():
        found = re.sub(r"```pycon\n.*?```", "", to_markdown(text), flags=re.DOTALL)
        assert not re.search(r":\w+:`|^\s*\.\. |^\s*>>>|::$", found, flags=re.MULTILINE), f"{name}: {found}"


PAGES = sorted(
    str(page.relative_to(ROOT)) for folder in ("docs", "results", "examples") for page in ROOT.glob(f"{folder}/**/*.md")
)


@pytest.mark.parametrize("page", ["README.md", *PAGES])
def test_lists_are_lists_on_the_site_too(page: str) -> None:
    """The site's Markdown, unlike that of GitHub, wants an empty line before a list that follows a paragraph."""
    markdown = pytest.importorskip("markdown", reason="mkdocs is not installed: pip install -e '.[dev]'")
    html = markdown.markdown((ROOT / page).read_text(), extensions=["tables", "fenced_code"])
    paragraphs = re.findall(r"<p>(.*?)</p>", html, flags=re.DOTALL)
    assert not [each for each in paragraphs if re.search(r"^\s*(-|\d+\.) ", each, flags=re.MULTILINE)]


def test_roles_become_links_and_formulas() -> None:
    link = '<autoref optional identifier="full.{}"><code>{}</code></autoref>'
    assert to_markdown("See :class:`Head`.") == f"See {link.format('Head', 'Head')}."
    assert (
        to_markdown("A :func:`~a.b.c` of :mod:`a.b`") == f"A {link.format('a.b.c', 'c')} of {link.format('a.b', 'a.b')}"
    )
    assert to_markdown("of :math:`x^2\n+ 1`, ``code``") == "of $x^2 + 1$, ``code``"


def test_blocks_become_fences_and_formulas() -> None:
    text = r"""
    Return it::

        a = b

    .. math::
        x = \frac12 \\
        + 1

    The end.

        >>> f(1,
        ...   2)
        3

    More.
    """
    assert to_markdown(text).split("\n") == [
        *("Return it:", "", "    a = b", ""),
        *("", "$$", r"x = \frac12 \\ + 1", "$$", "", "The end.", ""),
        *("    ```pycon", "    >>> f(1,", "    ...   2)", "    3", "    ```", "", "More."),
    ]


def test_formulas_become_mathml() -> None:
    content = loaded("docs/hooks.py").on_page_content
    found = content(r'<p><span class="arithmatex">\(c &lt; T\)</span></p>')
    assert found.startswith('<p><span class="formula"><math')
    assert "&#x0003C;" in found
    assert 'display="block"' in content('<div class="arithmatex">\\[\nx\n\\]</div>')


@pytest.mark.parametrize(
    ("tag", "outside"),
    [
        ('<script src="https://cdn.example/x.js">', True),
        ('<link rel="stylesheet" href="//fonts.example/a.css">', True),
        ('<img alt="a" src="http://example/x.png">', True),
        ('<a href="https://example">', False),
        ('<script src="../assets/x.js">', False),
    ],
)
def test_a_page_that_loads_from_outside_is_a_warning(tag: str, outside: bool, caplog: pytest.LogCaptureFixture) -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="a.md"))
    with caplog.at_level(logging.WARNING):
        assert loaded("docs/hooks.py").on_post_page(f"<p>{tag}", page=page) == f"<p>{tag}"
    assert bool(caplog.records) == outside


def test_the_table_of_results_has_every_page() -> None:
    linked = re.findall(r"\]\(([^)]+)\)", (ROOT / "results/README.md").read_text())
    pages = {path.relative_to(ROOT / "results").as_posix() for path in ROOT.glob("results/*/**/README.md")}
    assert set(linked) == pages


def test_the_description_of_the_package_has_links_that_work() -> None:
    describe = loaded("setup.py").describe
    readme = "![a plot](results/plot.png)\n\nIt [is\nfast](docs/fast.md#why), see [paper](https://a/b), [use](#use)."
    assert describe(readme, "https://host/us") == (
        "![a plot](https://host/us/raw/main/results/plot.png)\n\n"
        "It [is\nfast](https://host/us/blob/main/docs/fast.md#why), see [paper](https://a/b), [use](#use)."
    )
    alone = describe(readme, None)
    assert alone.startswith("It is\nfast, see [paper](https://a/b), [use](#use).\n")
    assert "left out" in alone
    captioned = describe("![a plot](plot.png)\n\n*What the plot\nshows.*\n\n**Bold** and *slanted*.", None)
    assert captioned.startswith("**Bold** and *slanted*.\n")


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, list[str]]]:
    """The address of the built site, and its pages."""
    folder = tmp_path_factory.mktemp("site")
    # Not --quiet: mkdocs does not count the warnings that it does not show.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, check=True)
    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        pages = sorted(path.parent.relative_to(folder).as_posix() for path in folder.rglob("index.html"))
        yield f"http://127.0.0.1:{server.server_port}", pages
        server.shutdown()


@pytest.fixture
def browser(request: pytest.FixtureRequest) -> Iterator[Any]:
    opened = open_chromium(*getattr(request, "param", (1200, 900)))
    yield opened
    opened.quit()


@pytest.mark.browser
@pytest.mark.timeout(600)
@pytest.mark.parametrize("browser", [(375, 800)], indirect=True)
def test_no_page_is_wider_than_a_phone_or_needs_another_host(site: tuple[str, list[str]], browser: Any) -> None:
    address, pages = site
    assert len(pages) > 30
    for page in pages:
        browser.get(f"{address}/{page}/")
        assert browser.execute_script("return document.documentElement.scrollWidth") <= 375, page
        asked = browser.execute_script("return performance.getEntriesByType('resource').map(each => each.name)")
        assert asked
        assert not [each for each in asked if not each.startswith((address, "data:"))], page
        assert not browser.get_log("browser"), page
    browser.execute_cdp_cmd("Network.setBlockedURLs", {"urls": ["*bundle*.js"]})  # as before the scripts are loaded
    browser.get(f"{address}/results/new-tokens/")
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 375


@pytest.mark.browser
@pytest.mark.timeout(600)
def test_the_search_finds_a_function(site: tuple[str, list[str]], browser: Any) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import WebDriverWait

    address, _ = site
    browser.get(address)
    browser.find_element(By.CSS_SELECTOR, "input.md-search__input").send_keys("linear_topk")
    found = "return [...document.querySelectorAll('.md-search-result__link')].map(each => each.href)"
    WebDriverWait(browser, 60).until(lambda _: any("/docs/api/loss/" in each for each in browser.execute_script(found)))
