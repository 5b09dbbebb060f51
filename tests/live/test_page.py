"""The page for people, in a real browser.

FATHOM_SCREENSHOTS=FOLDER keeps the pictures that the README shows.
"""

import contextlib
import json
import os
import pathlib
import re
import signal
import time

import pytest

from live import find_program

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (PyPI)")
expect = playwright.expect

WIDE = {"width": 1200, "height": 900}
NARROW = {"width": 360, "height": 740}


@pytest.fixture(scope="module")
def browser():
    path = find_program("chromium", "chromium-browser", "google-chrome", package="chromium")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser):
    """A page of its own context. Whatever it complains of in its console fails the test."""
    contexts, complaints = [], []

    def open_at(server, expected=(), **options):
        context = browser.new_context(**{"viewport": WIDE, **options})
        contexts.append(context)
        page = context.new_page()

        def complain(text):
            if not any(re.search(pattern, text) for pattern in expected):
                complaints.append(text)

        page.on("pageerror", lambda error: complain(str(error)))
        page.on("console", lambda line: line.type == "error" and complain(line.text))
        # The page must need nothing but this server.
        page.on("request", lambda request: request.url.startswith(server.url + "/")
                or complain(request.url))
        page.goto(server.url)
        return page

    yield open_at
    for context in contexts:
        context.close()
    assert not complaints


def keep_picture(page, name, full_page=True):
    if folder := os.environ.get("FATHOM_SCREENSHOTS"):
        page.screenshot(path=pathlib.Path(folder) / f"{name}.png", full_page=full_page)


def choose(page, tier):
    page.locator(f"#tiers input[value={tier}]").check()


def write(page, tokens=40):
    page.get_by_label("Tokens", exact=True).fill(str(tokens))
    page.get_by_role("button", name="Write").click()


def wait_written(page, lane=0):
    expect(page.locator(".lane header p").nth(lane)).to_have_text("as long as asked", timeout=30000)


def depths(page, lane=0):
    found = page.locator(".lane").nth(lane).locator(".token")
    return [int(depth) for depth in found.evaluate_all("all => all.map(one => one.dataset.depth)")]


# ---- What it shows --------------------------------------------------------------------------------


def test_the_answer_is_shaded_by_depth(server, open_page):
    page = open_page(server)
    expect(page.locator("#state")).to_have_text("ready")
    expect(page.locator("#model")).to_contain_text(server.model_id)
    choose(page, "fast")
    write(page, tokens=40)
    wait_written(page)
    # The same request without the page: the same text, and the same depth of each token.
    answer = server.complete(prompt="It was a dark night, and", quality="fast", max_tokens=40,
                             temperature=0.8, seed=7, return_depth=True).json()["choices"][0]
    lane = page.locator(".lane").first
    assert lane.locator(".text").inner_text() == "It was a dark night, and" + answer["text"]
    assert depths(page) == answer["depth"]
    assert lane.locator("[data-figure=count]").inner_text() == "40"
    shades = {}
    colors = lane.locator(".token").evaluate_all(
        "all => all.map(one => getComputedStyle(one).backgroundColor)")
    for color, depth in zip(colors, answer["depth"]):
        shades.setdefault(depth, set()).add(color)
    assert len(shades) > 2 and all(len(one) == 1 for one in shades.values())
    assert len(set.union(*shades.values())) == len(shades)


def test_the_tier_can_be_switched(server, open_page):
    page = open_page(server)
    total = server.model["fathom"]["sublayers"]
    tiers = server.model["fathom"]["tiers"]
    for tier in (tiers[0], tiers[-1]):
        choose(page, tier["name"])
        before = server.metric("fathom_time_to_first_token_seconds_count", quality=tier["name"])
        write(page)
        wait_written(page)
        expect(page.locator(".lane h2")).to_have_text(tier["name"])
        assert server.metric("fathom_time_to_first_token_seconds_count",
                             quality=tier["name"]) == before + 1
        assert (set(depths(page)) == {total}) == (tier["target_skip"] == 0)
    choose(page, "auto")
    write(page)
    wait_written(page)
    assert page.locator(".lane h2").inner_text() in [tier["name"] for tier in tiers]


def test_two_tiers_side_by_side(server, open_page):
    page = open_page(server)
    choose(page, "full")
    page.get_by_label("Compare with").select_option("fast")
    write(page, tokens=160)
    wait_written(page, 0)
    wait_written(page, 1)
    left, right = page.locator(".lane").all()
    assert left.bounding_box()["y"] == right.bounding_box()["y"]
    assert float(left.locator("[data-figure=speed]").inner_text()) > 0
    assert float(right.locator("[data-figure=speed]").inner_text()) > 0
    assert sum(depths(page, 1)) < sum(depths(page, 0))
    expect(page.locator("#verdict")).to_contain_text(re.compile(r"times as fast as .* sub-layers"))
    expect(page.locator("#server div").filter(has_text="sub-layers skipped").locator("dd")
           ).to_have_text(re.compile("%"), timeout=10000)
    keep_picture(page, "page-light")


def test_odd_text_is_text(server, open_page):
    page = open_page(server)
    prompt = "<b>&amp;</b> \u00e9\U0001f40b\n  \u05e9\u05dc\u05d5\u05dd"
    page.get_by_label("Prompt").fill(prompt)
    page.get_by_label("Temperature").fill("2")
    write(page, tokens=300)
    wait_written(page)
    assert page.locator(".text .prompt").evaluate("one => one.textContent") == prompt
    assert page.locator(".text b").count() == 0
    answer = server.complete(prompt=prompt, quality="full", max_tokens=300, temperature=2, seed=7)
    text = page.locator(".text").evaluate("one => one.textContent")
    assert text == prompt + answer.json()["choices"][0]["text"]


def test_the_server_state_is_shown(server, open_page):
    page = open_page(server)
    expect(page.locator("#server dt")).to_have_count(6)
    write(page, tokens=300)
    wait_written(page)
    lately = page.locator("#server div").filter(has_text="tokens/s, lately").locator("dd")
    expect(lately).to_have_text(re.compile(r"^[1-9]"), timeout=10000)


# ---- Its controls ---------------------------------------------------------------------------------


@contextlib.contextmanager
def busy(server):
    """Sequences beside the page's, so that its steps take long enough for something to happen
    between two of them."""
    fields = {"model": server.model_id, "prompt": "x", "n": 100, "max_tokens": 500, "ignore_eos": True}
    body = json.dumps(fields).encode()
    with server.connect() as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                           b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        while server.metric("fathom_num_requests_running") == 0:
            time.sleep(0.005)
        yield


def write_until_token(server, page, count):
    """Lets the server run in slices until the page shows so many tokens, and leaves it stopped: the
    answer is not over, however slow the browser is."""
    server.process.send_signal(signal.SIGSTOP)
    write(page, tokens=480)
    deadline = time.monotonic() + 30
    while page.locator(".token").count() < count:
        assert time.monotonic() < deadline
        server.process.send_signal(signal.SIGCONT)
        time.sleep(0.02)
        server.process.send_signal(signal.SIGSTOP)


# From inside the page: an answer can be over before a click from outside arrives.
STOP_AT_FIVE = """how => new MutationObserver((_, observer) => {
    if (document.querySelectorAll('.token').length < 5) return;
    observer.disconnect();
    if (how === 'button') document.querySelector('#stop').click();
    else document.body.dispatchEvent(new KeyboardEvent('keydown', {key: 'Escape', bubbles: true}));
}).observe(document.body, {childList: true, subtree: true})"""


@pytest.mark.parametrize("how", ["button", "escape"])
def test_stop(start_server, open_page, how):
    server = start_server(kv_budget="256MiB")
    page = open_page(server)
    with busy(server):
        expect(page.get_by_role("button", name="Stop")).to_be_disabled()
        page.evaluate(STOP_AT_FIVE, how)
        write(page, tokens=480)
        expect(page.locator(".lane header p")).to_have_text("stopped")
        written = page.locator(".token").count()
        assert 3 < written < 480
        deadline = time.monotonic() + 10
        while server.metric("fathom_requests_cancelled_total") < 1:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert page.locator(".token").count() == written
        expect(page.locator("#problem")).to_be_hidden()
    # And it can write again.
    write(page, tokens=5)
    wait_written(page)


def test_by_keyboard_alone(server, open_page):
    page = open_page(server)
    expect(page.get_by_role("button", name="Write")).to_be_enabled()
    page.get_by_label("Prompt").focus()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.value") == "full"
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.value") == "high"
    page.keyboard.press("Control+Enter")
    wait_written(page)
    expect(page.locator(".lane h2")).to_have_text("high")
    for _ in range(12):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.className") == "text":
            break
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    depth = depths(page)[1]
    expect(page.locator(".about")).to_contain_text(f"token 2 ")
    expect(page.locator(".about")).to_contain_text(f"{depth} of 24 sub-layers, probability ")
    expect(page.locator(".token.chosen")).to_have_count(1)


# ---- Chat, where the model has a format for it ----------------------------------------------------


def message_box(page):
    return page.get_by_label("Message, answered")


def wait_answered(page):
    expect(page.get_by_role("button", name="Send")).to_be_enabled(timeout=30000)


def test_no_chat_without_a_format(server, open_page):
    page = open_page(server)
    expect(page.get_by_role("button", name="Write")).to_be_enabled()
    assert server.model["fathom"]["chat_format"] is None
    expect(page.locator("#chat")).to_be_hidden()


def test_a_chat_is_what_the_server_answers(start_server, open_page):
    server = start_server(chat_format="plain")
    assert server.model["fathom"]["chat_format"] == "plain"
    page = open_page(server)
    page.get_by_label("Tokens", exact=True).fill("20")
    messages = []
    for text in ("Who keeps the light?", "<b>And</b> who\nelse?"):
        message_box(page).fill(text)
        message_box(page).press("Enter")
        wait_answered(page)
        messages.append({"role": "user", "content": text})
        answer = server.post("/v1/chat/completions", json={
            "model": server.model_id, "messages": messages, "max_tokens": 20, "temperature": 0.8,
            "seed": 7}).json()["choices"][0]["message"]
        messages.append({"role": "assistant", "content": answer["content"]})
        turns = page.locator(".turn").evaluate_all("all => all.map(one => one.textContent)")
        assert turns == [message["content"] for message in messages]
    assert page.locator("#talk b").count() == 0 and page.locator("#talk .token").count() > 2
    expect(message_box(page)).to_be_focused()
    expect(message_box(page)).to_have_value("")
    assert page.locator(".lane").count() == 0
    page.get_by_role("button", name="New chat").click()
    assert page.locator(".turn").count() == 0


def test_chat_keys(start_server, open_page):
    page = open_page(start_server(chat_format="plain"))
    page.get_by_label("Tokens", exact=True).fill("5")
    message_box(page).press_sequentially("one")
    message_box(page).press("Shift+Enter")
    message_box(page).press_sequentially("two")
    expect(message_box(page)).to_have_value("one\ntwo")
    message_box(page).press("Control+Enter")
    wait_answered(page)
    assert page.locator(".turn.user").evaluate("one => one.textContent") == "one\ntwo"
    assert page.locator(".turn").count() == 2 and page.locator(".lane").count() == 0


def test_a_chat_can_be_stopped(start_server, open_page):
    server = start_server(kv_budget="256MiB", chat_format="plain")
    page = open_page(server)
    page.get_by_label("Tokens", exact=True).fill("400")
    with busy(server):
        page.evaluate(STOP_AT_FIVE, "escape")
        message_box(page).fill("Tell me of the sea.")
        message_box(page).press("Enter")
        wait_answered(page)
        assert 3 < page.locator("#talk .token").count() < 400
        assert page.locator(".turn").count() == 2
        expect(page.locator("#problem")).to_be_hidden()


def test_a_chat_that_is_refused_is_asked_again(start_server, open_page):
    page = open_page(start_server(chat_format="plain"), expected=["status of 400"])
    message_box(page).fill("word " * 600)
    message_box(page).press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("context_length_exceeded")
    expect(message_box(page)).to_have_value("word " * 600)
    assert page.locator(".turn").count() == 0


# ---- What goes wrong ------------------------------------------------------------------------------


def test_a_refusal_is_shown(server, open_page):
    page = open_page(server, expected=["status of 400"])
    page.get_by_label("Prompt").fill("word " * 600)
    write(page)
    expect(page.get_by_role("alert")).to_contain_text("context_length_exceeded")
    expect(page.locator(".lane header p")).to_have_text("failed")
    page.get_by_label("Prompt").fill("word")
    write(page)
    wait_written(page)
    expect(page.get_by_role("alert")).to_be_hidden()


def test_a_server_that_dies_is_shown(start_server, open_page):
    server = start_server()
    page = open_page(server, expected=["ERR_CONNECTION_REFUSED"])
    expect(page.locator("#state")).to_have_text("ready")
    server.stop()
    write(page)
    expect(page.get_by_role("alert")).to_have_text("the server cannot be reached")
    expect(page.locator("#state")).to_have_text("unreachable", timeout=10000)


def test_an_error_within_the_stream_is_shown(start_server, open_page):
    server = start_server(kv_budget="256MiB", drain_timeout=0)
    page = open_page(server, expected=["ERR_"])
    with busy(server):
        write_until_token(server, page, 4)
        server.process.send_signal(signal.SIGTERM)
        server.process.send_signal(signal.SIGCONT)
        expect(page.get_by_role("alert")).to_contain_text("shutting down")
        expect(page.locator(".lane header p")).to_have_text("failed")


def test_a_key_is_asked_for(start_server, open_page):
    server = start_server(environment={"FATHOM_API_KEY": "the-key"})
    page = open_page(server, expected=["status of 401"])
    field = page.get_by_label("This server asks for an API key")
    expect(field).to_be_focused()
    expect(page.get_by_role("button", name="Write")).to_be_disabled()
    field.fill("not-the-key")
    field.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("invalid_api_key")
    field.fill("the-key")
    field.press("Enter")
    expect(field).to_be_hidden()
    write(page)
    wait_written(page)
    expect(page.locator("#server dt")).to_have_count(6)
    page.reload()  # a tab remembers it
    expect(page.get_by_role("button", name="Write")).to_be_enabled()
    expect(field).to_be_hidden()


def test_strict_policy(server, open_page):
    first, second = server.get("/"), server.get("/")
    policy = first.headers["content-security-policy"]
    nonces = set(re.findall(r"nonce-([0-9a-f]{32})'", policy))
    assert len(nonces) == 1 and policy != second.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert first.text.count(f'nonce="{nonces.pop()}"') == 2 and "@NONCE@" not in first.text
    assert len(first.content) < 32768
    # What is injected into the page does not run.
    page = open_page(server, expected=["Content Security Policy"])
    page.evaluate("""() => {
        document.body.insertAdjacentHTML("beforeend", "<img src=x onerror='window.broken = 1'>");
        document.body.append(Object.assign(document.createElement("script"),
                                           {textContent: "window.broken = 1"}));
    }""")
    page.wait_for_timeout(300)
    assert page.evaluate("window.broken") is None


# ---- How it looks ---------------------------------------------------------------------------------


def luminance(color):
    channels = [int(value) / 255 for value in re.findall(r"\d+", color)[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


# What a canvas paints is in sRGB, whatever notation the style is in: [ink, paper] of each element.
COLORS = """all => all.map(one => ["color", "backgroundColor"].map(property => {
    const pen = new OffscreenCanvas(1, 1).getContext("2d");
    pen.fillStyle = getComputedStyle(one)[property];
    pen.fillRect(0, 0, 1, 1);
    return pen.getImageData(0, 0, 1, 1).data.slice(0, 3).join(" ");
}))"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_schemes_can_be_read(server, open_page, scheme):
    page = open_page(server, color_scheme=scheme)
    choose(page, "fast")
    page.get_by_label("Compare with").select_option("full")
    write(page, tokens=120)
    wait_written(page, 1)
    paper = page.locator("body").evaluate_all(COLORS)[0][1]
    card = page.locator(".card").evaluate_all(COLORS)[1][1]
    assert (luminance(paper) < 0.1) == (scheme == "dark")
    for name in ("#model", ".hint", ".tiers small", ".lane header p", ".figures dt", "#verdict",
                 "footer", ".legend span"):
        for ink, _ in page.locator(name).evaluate_all(COLORS):
            assert contrast(ink, card) >= 4.5 and contrast(ink, paper) >= 4.5, name
    for ink, shade in page.locator(".token").evaluate_all(COLORS):
        assert contrast(ink, shade) >= 4.5, (ink, shade)
    page.locator(".lane").first.locator(".token").nth(9).hover()
    if scheme == "dark":
        keep_picture(page, "page-dark")


def test_small_screens(server, open_page):
    page = open_page(server, viewport=NARROW, device_scale_factor=2, is_mobile=True, has_touch=True)
    choose(page, "balanced")
    page.get_by_label("Compare with").select_option("full")
    write(page, tokens=60)
    wait_written(page, 1)
    first, second = [lane.bounding_box() for lane in page.locator(".lane").all()]
    assert first["x"] == second["x"] and second["y"] > first["y"]
    assert page.evaluate("document.documentElement.scrollWidth") <= NARROW["width"]
    page.locator(".legend").evaluate("one => one.scrollIntoView()")
    keep_picture(page, "page-small", full_page=False)
