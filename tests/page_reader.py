"""A real Chromium that reads and fills the page of scripts/demo.py, for tests and for pictures in docs."""

import io
import shutil
import urllib.request
from collections.abc import Callable
from typing import Any

import numpy as np
from matplotlib.image import imread
from selenium.webdriver import Chrome, ChromeOptions, ChromeService
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait


PATIENCE = 90  # seconds; the page itself needs less than one


def start_browser(width: int = 1000, height: int = 1000) -> Chrome:
    """Returns a headless Chromium; no sandbox, which needs another user than root."""
    options = ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for flag in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "disable-gpu", "no-proxy-server"):
        options.add_argument(f"--{flag}")
    options.add_argument(f"--window-size={width},{height}")
    return Chrome(options=options, service=ChromeService(shutil.which("chromedriver")))


class PageReader:
    """One tab with the page."""

    def __init__(self, browser: Chrome, url: str):
        self.browser, self.url = browser, url
        browser.switch_to.new_window("tab")
        self.tab = browser.current_window_handle
        browser.get(url)
        self.wait(lambda: self.find("#ask").is_enabled())

    def find(self, selector: str) -> Any:
        return self.browser.find_element(By.CSS_SELECTOR, selector)

    def find_all(self, selector: str) -> list[Any]:
        return self.browser.find_elements(By.CSS_SELECTOR, selector)

    def wait(self, is_there: Callable[[], Any]) -> Any:
        """Returns the first true value; elements come and go while the page draws itself."""

        def look(_) -> Any:
            self.browser.switch_to.window(self.tab)
            return is_there()

        return WebDriverWait(self.browser, PATIENCE, 0.1, [Exception]).until(look)

    def ask(self, **texts: str) -> None:
        """Fills the fields by their names, and presses the button."""
        self.browser.switch_to.window(self.tab)
        for name, text in texts.items():
            field = self.find(f"#{name} textarea")
            field.send_keys(Keys.CONTROL, "a")
            field.send_keys(Keys.DELETE)
            field.send_keys(text)
        self.find("#ask").click()

    def written(self) -> str:
        """Returns what stands in the answer's field."""
        self.browser.switch_to.window(self.tab)
        return self.find("#answer textarea").get_property("value")

    def shown(self) -> str:
        """Returns the text of an answer that is no field."""
        self.browser.switch_to.window(self.tab)
        return self.find("#answer").text

    def toast(self) -> str:
        """Returns the message that pops up, and closes it."""
        toast = self.wait(lambda: self.find(".toast-body"))
        text = self.wait(lambda: toast.text)
        self.browser.execute_script("document.querySelector('.toast-close')?.click()")
        self.wait(lambda: not self.find_all(".toast-body"))
        return text

    def choose(self, field: str, option: str) -> None:
        """Chooses of a dropdown."""
        self.browser.switch_to.window(self.tab)
        self.find(f"#{field} input").click()
        options = self.wait(lambda: self.find_all("[role=option]"))
        next(one for one in options if one.get_attribute("aria-label") == option).click()

    def image(self, other_than: str | None = None) -> tuple[str, np.ndarray]:
        """Returns the address and the pixels of the picture, once there is one, and another one."""

        def address() -> str | None:
            found = self.find("#attention img").get_attribute("src")
            return found if found != other_than else None

        found = self.wait(address)
        with urllib.request.urlopen(found) as answer:
            return found, (imread(io.BytesIO(answer.read()))[..., :3] * 255).round().astype(np.uint8)
