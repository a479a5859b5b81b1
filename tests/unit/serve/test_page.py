"""The page at /, in a real browser where there is one, and without it as far as that goes."""

import re
import shutil

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


def test_the_page_needs_nothing_from_elsewhere(api) -> None:
    page = api.http.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert not re.search(r"(src|href)=\"(?!data:,)|https?://|@import", page.text)


@pytest.fixture
def browser():
    """Headless Chromium; skipped where Playwright or the browser is missing."""
    playwright = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine: apt install chromium")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


def ask(page, text):
    """Write a message and send it, by keyboard; wait for the figures under the answer."""
    page.keyboard.type(text)
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Stop").wait_for()
    page.get_by_role("button", name="Send").wait_for(timeout=30_000)


def test_a_chat_by_keyboard_with_a_key_settings_and_gauges(serve, browser) -> None:
    api = serve(api_key="secret")
    failures = []
    # Conditions that a test waits for are evaluated, which the page itself may not do.
    phone = {"viewport": {"width": 360, "height": 640}, "color_scheme": "dark"}
    page = browser.new_page(**phone, bypass_csp=True)
    page.set_default_timeout(20_000)
    page.on("pageerror", lambda error: failures.append(error))
    page.goto(api.url)
    page.get_by_label("API key", exact=True).last.wait_for()
    page.keyboard.type("wrong")
    page.keyboard.press("Enter")
    page.wait_for_function("document.querySelector('#key').value === ''")
    page.keyboard.type("secret")
    page.keyboard.press("Enter")
    page.wait_for_function("document.title === 'tiny-chat'")
    page.get_by_text("Settings").click()
    page.get_by_label("Longest answer").fill("12")
    page.get_by_label("Temperature").fill("1")
    page.get_by_label("Seed").fill("7")
    page.get_by_label("Message", exact=True).focus()
    ask(page, "How is the weather?")
    ask(page, "And now?")
    assert page.locator(".user").all_text_contents() == ["How is the weather?", "And now?"]
    assert page.locator(".note").count() == 2
    assert re.search(
        r"\d+ tokens, first after [\d.]+ s", page.locator(".note").first.text_content()
    )
    body = {"messages": [{"role": "user", "content": "How is the weather?"}]}
    fields = {"temperature": 1, "seed": 7, "max_tokens": 12}
    key = {"authorization": "Bearer secret"}
    told = api.http.post("/v1/chat/completions", json={**body, **fields}, headers=key).json()
    answers = page.locator(".assistant").all_text_contents()
    assert answers[0] == told["choices"][0]["message"]["content"]
    assert "running" in page.locator("#running").text_content()
    page.wait_for_function("document.querySelector('#cache').textContent.endsWith('%')")
    # No part of it is wider than a phone.
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == "rgb(22, 22, 20)"
    page.get_by_role("button", name="New chat").click()
    assert page.locator(".said").count() == 0
    assert failures == []


def test_an_answer_is_stopped_by_escape_and_its_request_ends(serve, browser) -> None:
    api = serve()
    page = browser.new_page()
    page.set_default_timeout(20_000)
    page.goto(api.url)
    page.get_by_label("Message", exact=True).focus()
    page.keyboard.type("Go on")
    page.keyboard.press("Enter")
    page.locator(".assistant").wait_for()
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Send").wait_for()
    api.wait_idle()


def test_what_the_server_refuses_is_told(serve, browser) -> None:
    api = serve()
    page = browser.new_page()
    page.goto(api.url)
    page.get_by_text("Settings").click()
    page.get_by_label("Longest answer").fill("100000")
    page.get_by_label("Message", exact=True).fill("Hi")
    page.keyboard.press("Enter")
    page.get_by_text("exceed the model's window of 256 tokens").wait_for(timeout=20_000)
