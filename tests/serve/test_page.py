"""The chat page in a headless Chromium."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from importlib.resources import files
from typing import Any

import pytest

from tests.serve.conftest import Server
from tests.serve.stub import Stub, stub_server

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
HOSTILE = """\
<img src=x onerror="document.title = 'owned'"> & <script>document.title = 'owned'</script>
[here](javascript:document.title='owned') [there](https://example.org/a)

- **bold** and *slanted*
  1. `a < b`

| a | b |
|---|--:|
| 1 | <b>2</b> |

```html
<img src=x onerror="document.title = 'owned'">
**not bold**
```
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("no chromium is installed")
    with api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield started
        started.close()


@pytest.fixture(scope="module")
def stub() -> Iterator[Stub]:
    with stub_server() as started:
        yield started


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """Open the page. At the end, no script may have failed."""
    contexts, failures = [], []

    def open_at(url: str, **options: Any) -> Any:
        contexts.append(browser.new_context(**options))
        page = contexts[-1].new_page()
        page.on("pageerror", lambda error: failures.append(str(error)))
        page.set_default_timeout(20_000)
        page.goto(url)
        page.wait_for_selector("#model[data-state=ready]")
        return page

    yield open_at
    for each in contexts:
        each.close()
    assert not failures


def ask(page: Any, text: str) -> None:
    page.fill("#prompt", text)
    page.keyboard.press("Enter")


def test_the_page_is_small_and_names_no_other_host() -> None:
    texts = [each.read_text() for each in files("tilewright.serve").joinpath("page").iterdir()]
    assert len(texts) == 4 and sum(len(text.encode()) for text in texts) < 100_000
    named = {name for text in texts for name in re.findall(r"https?://([\w.-]+)", text)}
    assert named == {"www.w3.org"}  # SVG namespace in the icon


def test_it_asks_this_server_alone_and_a_stop_frees_the_slot(
    slow_server: Server, open_page: Callable[..., Any]
) -> None:
    server = slow_server
    page = open_page(server.url)
    hosts: list[str] = []
    page.on("request", lambda request: hosts.append(request.url))
    page.reload()
    page.wait_for_selector("#model[data-state=ready]")
    assert "on reference" in page.inner_text("#model")
    # The page's script stops the answer: a call from outside may be too late.
    page.evaluate(
        "() => { let seen = 0; const stop = document.getElementById('stop');"
        "new MutationObserver(() => { seen += 1; if (seen === 3) stop.click(); })"
        ".observe(document.getElementById('turns'), {subtree: true, childList: true}); }"
    )
    ask(page, "hello")
    page.wait_for_selector(".note:has-text('stopped after')")
    server.wait_until(lambda: server.gauge("num_requests_running") == 0)

    page.click("#open-settings")
    page.fill("#max_tokens", "3")
    page.click("text=Done")
    ask(page, "hello")
    note = page.locator(".note").nth(1)
    note.filter(has_text="3 tokens at").wait_for()
    found = r"\d+ tokens read(, \d+ of them cached)? · first text after [\d.]+ s · "
    assert re.fullmatch(found + r"3 tokens at [\d.]+ t/s · cut short", note.inner_text())
    assert all(url.startswith((server.url, "data:")) for url in hosts), hosts


def test_what_a_model_writes_stays_text(stub: Stub, open_page: Callable[..., Any]) -> None:
    """Markdown becomes elements. No text becomes a script or an image."""
    page = open_page(stub.url)
    stub.script = [{"content": HOSTILE[at : at + 7]} for at in range(0, len(HOSTILE), 7)]
    ask(page, "<b>hi</b>")
    page.wait_for_selector("button:has-text('Again')")
    turns = page.locator("#turns")
    assert turns.locator("img, script, b").count() == 0
    assert page.title() == "a-model · Tilewright"
    assert page.locator(".user").inner_text() == "<b>hi</b>"
    text = turns.inner_text()
    assert "<img src=x onerror=" in text and "[here](javascript:" in text
    links = turns.locator("a")
    assert links.count() == 1 and links.get_attribute("href") == "https://example.org/a"
    assert links.get_attribute("rel") == "noopener noreferrer"
    assert turns.locator("li strong").inner_text() == "bold"
    assert turns.locator("li li code").inner_text() == "a < b"
    assert turns.locator("td.right").inner_text() == "<b>2</b>"
    assert turns.locator("pre code").inner_text() == "\n".join(HOSTILE.split("\n")[-4:-2])
    assert turns.locator(".code span").inner_text() == "html"
    # the policy also blocks inline scripts
    page.evaluate(
        "() => { const made = document.createElement('script'); "
        "made.textContent = 'document.title = \"owned\"'; document.body.append(made); }"
    )
    assert page.title() == "a-model · Tilewright"


def test_a_dropped_image_goes_with_the_message(stub: Stub, open_page: Callable[..., Any]) -> None:
    page = open_page(stub.url)
    stub.script = [{"content": "A dot."}]
    page.evaluate(
        "() => { const files = new DataTransfer(); files.items.add(new File([new Uint8Array("
        "[71, 73, 70])], 'a.gif', {type: 'image/gif'})); document.dispatchEvent(new DragEvent("
        "'drop', {bubbles: true, cancelable: true, dataTransfer: files})); }"
    )
    page.wait_for_selector("#images img", state="attached")
    ask(page, "what?")
    page.wait_for_selector("button:has-text('Again')")
    image = {"type": "image_url", "image_url": {"url": "data:image/gif;base64,R0lG"}}
    expected = [{"role": "user", "content": [image, {"type": "text", "text": "what?"}]}]
    assert stub.asked[-1]["messages"] == expected
    page.click("button:has-text('Again')")
    page.wait_for_selector("#stop", state="hidden")
    assert stub.asked[-1]["messages"] == expected
    assert page.locator("#images img").count() == 0


def test_reasoning_is_folded_and_opens_with_the_keyboard(
    stub: Stub, open_page: Callable[..., Any]
) -> None:
    page = open_page(stub.url)
    stub.go.clear()
    stub.script = [{"reasoning_content": "Two and two."}, None, {"content": "Four."}]
    ask(page, "2 + 2?")
    thought = page.locator(".thought summary")
    thought.filter(has_text="Thinking").wait_for()
    stub.go.set()
    thought.filter(has_text="Thought for").wait_for()
    page.wait_for_selector("button:has-text('Again')")
    assert not page.locator(".thought div").is_visible()
    thought.focus()
    page.keyboard.press("Enter")
    assert page.locator(".thought div").inner_text() == "Two and two."
    page.click("button:has-text('Again')")  # reasoning is excluded from the next request
    page.wait_for_selector("#stop", state="hidden")
    assert stub.asked[-1]["messages"] == [{"role": "user", "content": "2 + 2?"}]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_400_pixels_in_light_and_dark(
    scheme: str, stub: Stub, open_page: Callable[..., Any]
) -> None:
    page = open_page(stub.url, viewport={"width": 400, "height": 700}, color_scheme=scheme)
    stub.script = [{"content": f"{'x' * 300}\n\n```\n{'y' * 300}\n```\n\n{HOSTILE}"}]
    ask(page, "wide")
    page.wait_for_selector("button:has-text('Again')")
    assert page.evaluate("document.documentElement.scrollWidth") == 400
    for part in ("#prompt", "#send", "#open-settings", "#clear"):
        box = page.locator(part).bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= 400, part
        assert box["y"] >= 0 and box["y"] + box["height"] <= 700, part
    ink = [
        page.evaluate(f"getComputedStyle(document.querySelector('{part}')).color")
        for part in (".text p", ".note")
    ]
    back = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (luminance(back) < 0.1) is (scheme == "dark")
    assert contrast(ink[0], back) >= 7 and contrast(ink[1], back) >= 4.5


def luminance(colour: str) -> float:
    """Return the relative luminance of ``rgb(r, g, b)`` by WCAG."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted(map(luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


def test_the_keyboard_alone_will_do(stub: Stub, open_page: Callable[..., Any]) -> None:
    page = open_page(stub.url)
    keys = page.keyboard
    stub.go.clear()
    stub.script = [{"content": "One,"}, None, {"content": " two."}]
    assert page.evaluate("document.activeElement.id") == "prompt"
    keys.type("Count")
    keys.press("Shift+Enter")
    keys.type("please")
    keys.press("Enter")
    page.wait_for_selector(".assistant p:has-text('One,')")
    left = stub.num_left
    keys.press("Escape")
    page.wait_for_selector(".note:has-text('stopped after')")
    assert stub.asked[-1]["messages"][-1]["content"] == "Count\nplease"
    stub.go.set()
    for _ in range(40):
        if stub.num_left > left:
            break
        page.wait_for_timeout(50)
    assert stub.num_left == left + 1  # the server received it
    for name in ("open-settings", "clear"):
        page.focus("#prompt")
        for _ in range(20):
            keys.press("Shift+Tab")
            if page.evaluate("document.activeElement.id") == name:
                break
        assert page.evaluate("document.activeElement.id") == name
        keys.press("Enter")
        if name == "open-settings":
            assert page.locator("dialog").is_visible()
            assert page.evaluate("document.activeElement.id") == "system"
            keys.type("Be brief.")
            keys.press("Escape")
            page.wait_for_timeout(100)  # the dialog returns its focus in a later task
            assert page.evaluate("document.activeElement.id") == "prompt"
    assert page.locator(".turn").count() == 0
    keys.type("Go on")
    keys.press("Enter")
    page.wait_for_selector("button:has-text('Again')")
    roles = [each["role"] for each in stub.asked[-1]["messages"]]
    assert roles == ["system", "user"]
