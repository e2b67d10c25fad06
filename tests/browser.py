"""Debian's Chromium for the tests marked `browser`, cut off from every host but this one."""

from __future__ import annotations

import shutil
from typing import Any


def open_chromium(width: int = 1200, height: int = 1000, **preferences: str) -> Any:
    """Return selenium's driver of a browser without a window; below 500 pixels it is a phone."""
    from selenium import webdriver

    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    assert chromium, "these tests need Debian's packages chromium and chromium-driver"
    assert driver, "these tests need Debian's packages chromium and chromium-driver"
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for each in (
        "--headless=new",
        "--no-sandbox",
        "--disable-dev-shm-usage",
        f"--window-size={width},{height}",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    ):
        options.add_argument(each)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    options.add_experimental_option("prefs", preferences)
    opened = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    if width < 500:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": True}
        opened.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    return opened
