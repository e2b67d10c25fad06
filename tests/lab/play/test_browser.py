"""The page in a real browser: Debian's Chromium. The network is cut for the browser and for the server."""

import json
import re
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.browser import open_chromium
from tests.lab.play.toy import Client, serving

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]

PATH = [(-60, -70), (-60, 10), (-30, 50), (30, 50), (60, 10), (60, -30)]  # a hook, in pixels from the middle


@pytest.fixture
def server(play_cache: Path) -> Iterator[Client]:
    with serving(play_cache) as client:
        yield client


class Page:
    """The page in a browser, and what a visitor does there."""

    def __init__(
        self, server: Client, downloads: Path, width: int = 1200, height: int = 1000, wait: bool = True
    ) -> None:
        self.driver = open_chromium(width, height, **{"download.default_directory": str(downloads)})
        self.url = f"http://127.0.0.1:{server.port}/"
        self.requested: list[str] = []
        self.driver.get(self.url)
        if wait:
            self.until_ready()

    def until_ready(self) -> None:
        self.until(lambda: self("lesson").is_displayed(), "the network is ready", 120)

    def __call__(self, name: str) -> Any:
        return self.driver.find_element("id", name)

    def until(self, met: Callable[[], Any], what: str, seconds: float = 30) -> None:
        deadline = time.monotonic() + seconds
        while not met():
            assert time.monotonic() < deadline, f"{what}; the page says: {self('message').text}"
            time.sleep(0.05)

    def draw(self, by: int = 0) -> None:
        """Draw a hook with the mouse, moved by some pixels."""
        from selenium.webdriver import ActionChains

        paper = self("paper")
        self.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", paper)
        chain = ActionChains(self.driver, duration=20).move_to_element_with_offset(paper, PATH[0][0] + by, PATH[0][1])
        chain.click_and_hold()
        for (x, y), (next_x, next_y) in pairwise(PATH):
            chain.move_by_offset(next_x - x, next_y - y)
        chain.release().perform()

    def lines(self) -> int:
        """Return how many lines are on the paper."""
        return int(self("paper").get_attribute("aria-label").split()[2])

    def name(self, text: str) -> None:
        self("name").clear()
        self("name").send_keys(text)

    def taught(self) -> list[str]:
        script = "return [...document.querySelectorAll('#taught .what')].map((each) => each.textContent)"
        return list(self.driver.execute_script(script))

    def answers(self, head: str) -> list[str]:
        script = f"return [...document.querySelectorAll('#{head}-answers span')].map((each) => each.textContent)"
        return list(self.driver.execute_script(script))

    def press(self, label: str) -> None:
        button = self.driver.find_element("css selector", f"[aria-label='{label}']")
        self.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", button)
        button.click()

    def click(self, name: str) -> None:
        self.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", self(name))
        self(name).click()

    def check_logs(self) -> None:
        """Nothing is in the console, and nothing was asked of any other computer."""
        assert self.driver.get_log("browser") == []
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                self.requested.append(message["params"]["request"]["url"])
        own = (self.url, "data:", f"blob:{self.url.rstrip('/')}")
        assert self.requested
        assert [url for url in self.requested if not url.startswith(own)] == []


@pytest.fixture
def open_page(server: Client, tmp_path: Path) -> Iterator[Callable[..., Page]]:
    pages: list[Page] = []

    def opened(**size: int) -> Page:
        pages.append(Page(server, tmp_path, **size))
        return pages[-1]

    yield opened
    try:
        for page in pages:
            page.check_logs()
    finally:
        for page in pages:
            page.driver.quit()


def test_draw_teach_recognise_rename_undo_forget(open_page: Callable[..., Page], tmp_path: Path) -> None:
    page = open_page()
    page.draw()
    page.until(lambda: len(page.answers("plain")) == len(page.answers("hebbian")) == 5, "both heads answer")
    assert page("nothing-taught").is_displayed()
    page.name("hook")
    page.click("teach-button")
    page.until(lambda: page.taught() == ["hook"], "the hook is taught")
    page.until(lambda: page.answers("hebbian")[0] == page.answers("plain")[0] == "hook", "both heads know the hook")
    assert "ms" in page("learned").text

    page.click("clear")
    page.until(lambda: not page.answers("hebbian"), "nothing is drawn")
    page.draw(by=5)
    page.until(lambda: page.answers("hebbian")[:1] == ["hook"], "the hook is recognised")
    assert page.lines() == 1
    page.draw(by=-5)
    assert page.lines() == 2
    page.click("teach-button")
    page.until(lambda: page.taught() == ["hook (2)"], "a second example is taught")
    page.draw()
    assert page.lines() == 1, "a new line begins a new drawing once the last one is taught"
    page.click("undo")
    page.until(lambda: page.taught() == ["hook"], "the second example is undone")

    page.press("Rename hook")
    field = page.driver.find_element("css selector", "#taught input")
    field.clear()
    field.send_keys("Ω <b>")
    page.press("Give hook its new name")
    assert page.driver.execute_script("return document.querySelector('#taught input').validity.patternMismatch")
    field.clear()
    field.send_keys("Ω 'b'\n")
    page.until(lambda: page.taught() == ["Ω 'b'"], "the hook is renamed")

    page.click("save")
    page.until(lambda: list(tmp_path.glob("lesson*.json")), "the lesson is saved")
    (path,) = tmp_path.glob("lesson*.json")
    saved = json.loads(path.read_text())
    assert [each["name"] for each in saved["taught"]] == ["Ω 'b'"]

    page.driver.find_element("css selector", '[aria-label^="Forget"]').click()
    page.until(lambda: page.taught() == [], "the hook is forgotten")
    page.until(lambda: "Ω 'b'" not in page.answers("hebbian") + page.answers("plain"), "no head knows it")
    page("file").send_keys(str(path))
    page.until(lambda: page.taught() == ["Ω 'b'"], "the lesson is loaded")
    path.write_text("no JSON")
    page("file").send_keys(str(path))
    page.until(lambda: "not a saved lesson" in page("message").text, "a bad file is named")
    assert page.taught() == ["Ω 'b'"]
    page.driver.refresh()
    page.until_ready()
    page.until(lambda: page.taught() == ["Ω 'b'"], "a reloaded page keeps its lesson")


def test_ready_made_drawings(open_page: Callable[..., Page]) -> None:
    page = open_page()
    buttons = page.driver.find_elements("css selector", "#ready-made button")
    assert len(buttons) == 50
    page.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", buttons[7])
    buttons[7].click()
    page.until(lambda: len(page.answers("hebbian")) == 5, "it is recognised")
    assert buttons[7].get_attribute("aria-pressed") == "true"
    page.click("teach-all")
    page.until(lambda: len(page.taught()) == 10, "ten characters are taught")
    page.until(lambda: page("test-all").is_enabled(), "all is taught")
    page.click("test-all")
    page.until(lambda: page("test-all").is_enabled(), "all is tested")
    assert re.fullmatch(
        r"Recognised among all 50: plain softmax \d+ of 40, Hebbian head \d+ of 40\.", page("score").text
    )
    assert re.search(r"of 40 characters .* plain softmax recognises \d+, the Hebbian head \d+\.", page("price").text)
    # A visitor who draws while drawings are being tested loses the line, and nothing else happens.
    page.click("test-all")
    page.draw()
    page.until(lambda: page("test-all").is_enabled(), "all is tested again")


def test_a_curriculum_is_watched_live(open_page: Callable[..., Page]) -> None:
    page = open_page()
    page.click("tab-watch")
    for name, value in (("curriculum-steps", 100), ("gamma", 0.2)):
        page(name).clear()
        page(name).send_keys(str(value))
    page.click("start")
    points = "return document.querySelector('#chart polyline.hebbian')?.getAttribute('points').split(' ').length ?? 0"
    page.until(lambda: page.driver.execute_script(points) >= 2, "the first check is shown", 90)
    page.click("pause")
    page.until(lambda: page("pause").text == "Resume", "it pauses")
    page("limit").clear()
    page.click("change")  # the browser asks for a number
    page("limit").send_keys("7")
    page.click("change")
    page.until(lambda: "γ 0.2, T 7" in page("chart").text, "the change is marked")
    page.click("pause")
    page.until(lambda: page("curriculum-state").text == "Finished after 100 steps.", "it ends", 120)
    assert page.driver.execute_script(points) == 5
    for head in ("plain", "hebbian"):
        assert int(page(f"{head}-classes").text) >= 30
        assert page(f"{head}-accuracy").text.endswith("%")
        assert len(page.driver.find_elements("css selector", f"#{head}-hardest li")) == 5
    page.click("start")
    page.until(lambda: page("stop").is_enabled(), "it starts again", 120)
    page.click("stop")
    page.until(lambda: page("curriculum-state").text == "Stopped.", "it stops")


def test_a_server_that_ends_and_comes_back(play_cache: Path, tmp_path: Path) -> None:
    with serving(play_cache) as client:
        page = Page(client, tmp_path)
    try:  # the server has ended
        page.draw()
        page.until(lambda: "is hebbian play still running?" in page("message").text, "the page says so")
        with serving(play_cache, client.port) as again:
            again.until_ready()
            page.draw()
            page.until(lambda: "reload the page" in page("message").text, "the page says what to do")
            page.driver.refresh()
            page.until_ready()
            page.click("tab-watch")
            page.click("start")
            page.until(lambda: page("curriculum-state").text.startswith("Step"), "a curriculum runs", 90)
        page.until(lambda: "is hebbian play still running?" in page("curriculum-state").text, "the page says so")
        with serving(play_cache, client.port) as again:
            again.until_ready()
            page.until(lambda: "start it again" in page("curriculum-state").text, "the page says what to do")
            assert not page("stop").is_enabled()
    finally:
        page.driver.quit()


def test_phone_width_and_touch(open_page: Callable[..., Page]) -> None:
    page = open_page(width=375, height=740)
    overflow = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert page.driver.execute_script(overflow) == 0
    page.driver.execute_script("document.getElementById('paper').scrollIntoView({block: 'center'})")
    box = page.driver.execute_script(
        "const b = document.getElementById('paper').getBoundingClientRect(); return [b.x, b.y]"
    )
    for kind, (x, y) in [
        ("touchStart", (80, 60)),
        ("touchMove", (90, 160)),
        ("touchMove", (180, 200)),
        ("touchEnd", (0, 0)),
    ]:
        points = [] if kind == "touchEnd" else [{"x": box[0] + x, "y": box[1] + y}]
        page.driver.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
    page.until(lambda: len(page.answers("hebbian")) == 5, "a finger draws")
    page.name("a name that is as long as names can be wow")
    page.click("teach-button")
    page.until(lambda: len(page.taught()) == 1, "it is taught")
    assert page.driver.execute_script(overflow) == 0
    page.click("tab-watch")
    assert page.driver.execute_script(overflow) == 0


def test_everything_by_keyboard(open_page: Callable[..., Page]) -> None:
    from selenium.webdriver import ActionChains, Keys

    page = open_page()
    page.driver.execute_script("document.getElementById('paper').focus()")
    keys = ActionChains(page.driver)
    keys.send_keys(" ", *[Keys.ARROW_DOWN] * 5, *[Keys.ARROW_RIGHT] * 5, " ").perform()
    page.until(lambda: len(page.answers("hebbian")) == 5, "keys draw")
    ActionChains(page.driver).send_keys(Keys.TAB, "corner", Keys.ENTER).perform()
    page.until(lambda: page.taught() == ["corner"], "Enter teaches")
    page.driver.execute_script("document.getElementById('tab-teach').focus()")
    ActionChains(page.driver).send_keys(Keys.ARROW_RIGHT).perform()
    assert page("watch").is_displayed()
    assert page.driver.switch_to.active_element.get_attribute("id") == "tab-watch"
    unnamed = """
        const all = [...document.querySelectorAll('button, input, canvas[role], svg[role], ol, ul')];
        const named = (each) => each.getAttribute('aria-label') || each.textContent.trim() || each.labels?.length;
        return all.filter((each) => !named(each)).map((each) => each.outerHTML);
    """
    assert page.driver.execute_script(unnamed) == []


def test_two_tabs_do_not_disturb_each_other(open_page: Callable[..., Page]) -> None:
    page = open_page()
    page.draw()
    page.name("first")
    page.click("teach-button")
    page.until(lambda: page.taught() == ["first"], "the first tab teaches")
    first = page.driver.current_window_handle
    page.driver.execute_script("window.open(location.href)")  # the new tab gets a copy of the session's storage
    (second,) = set(page.driver.window_handles) - {first}
    page.driver.switch_to.window(second)
    page.until(lambda: page("lesson").is_displayed(), "the second tab is ready")
    assert page.taught() == []
    page.draw()
    page.name("second")
    page.click("teach-button")
    page.until(lambda: page.taught() == ["second"], "the second tab teaches")
    page.driver.switch_to.window(first)
    assert page.taught() == ["first"]
    page.click("undo")
    page.until(lambda: page.taught() == [], "the first tab takes back its own act")
    page.driver.switch_to.window(second)
    page.until(lambda: page.answers("hebbian")[:1] == ["second"], "the second tab still knows its character")


def test_the_first_use_shows_progress(tmp_path: Path) -> None:
    with serving(tmp_path / "empty") as client:
        page = Page(client, tmp_path, wait=False)
        try:
            seen: list[str] = []

            def is_ready() -> bool:
                seen.append(page.driver.find_element("css selector", "label[for=progress]").text)
                return bool(page("lesson").is_displayed())

            page.until(is_ready, "the network is ready", 120)
            assert any(re.fullmatch(r"Training the network, once \(\d+ %\)", text) for text in seen), seen
            page.check_logs()
        finally:
            page.driver.quit()
