"""The report in a real browser: headless Chromium opens the file from disk, clicks, types, drags (extra ``browser``).

    pip install '.[browser]'        and chromium, chromedriver on the PATH (Debian: chromium, chromium-driver)

Without them these tests skip; with P07_REQUIRE_EXTRAS=1 they fail. Nothing here measures time: that a long run stays
smooth is shown by how few frames a jump replays, and by what is not painted again.
"""

from __future__ import annotations

import os
import random
import tempfile
import unittest
from itertools import combinations
from pathlib import Path
from typing import Any

from scripts.screenshot_report import Browser, programs
from starter.command.play import play
from starter.engine import InferenceEngine
from starter.kv_cache import KVCacheManager
from starter.metrics import MetricsCollector
from starter.observe.report import write_report
from starter.scheduler import ContinuousBatchScheduler
from starter.schema import ENGINE_SHAPE, MODEL_SHAPE, EngineSettings, SamplingParams, load_scenario
from starter.timeline import Event, Recorder, VirtualClock
from starter.workloads.draw import DEFAULT_MODEL, Workload, generate_requests
from tests.extras import needs
from tests.paths import FIXTURE
from tests.support import Ask, make_engine

SEED = 5
WORK = Workload(SEED, 200, "bursty", rate=0.1, burst=8, prompt=(10, 90), output=(40, 120), prefix_share=0.5,
                prefix_tokens=32)
BUSY = EngineSettings().override({"page_size": 8, "num_pages": 160, "budget_tokens": 48, "max_running": 24,
                                  "prefix_sharing": True, "preemption": "swap", "host_pages": 200})


def fixture_events() -> list[Event]:
    scenario = load_scenario(FIXTURE)
    with InferenceEngine.from_scenario(scenario, clock=VirtualClock()) as engine:
        for _ in play(engine, scenario):
            pass
        return list(engine.timeline.events)


def sharing_events() -> list[Event]:
    """Three requests with a common beginning, one of them with two samples; a cancel; one that is refused."""
    with make_engine(page_size=2, num_pages=16, prefix_sharing=True, budget_tokens=8) as engine:
        first = (3, 1, 4, 1, 5, 9)
        Ask(first, 8).submit(engine, "one")
        for _ in range(3):
            engine.step()
        Ask((*first, 2), 6).submit(engine, "two")
        Ask((*first, 6), 6, SamplingParams(0.8, seed=1, n=2)).submit(engine, "请求</script>")
        for _ in range(2):
            engine.step()
        engine.cancel("two")
        engine.run()
        return list(engine.timeline.events)


def long_events() -> list[Event]:
    """2,000 steps of 200 requests: the scheduler and the page manager with nobody who computes."""
    recorder, kv = Recorder(VirtualClock(), MetricsCollector()), KVCacheManager(
        BUSY.num_pages, BUSY.page_size, prefix_sharing=True, host_pages=BUSY.host_pages,
        observer=lambda change, request, pages: recorder.event(
            "pages", change=change, request=request, pages=list(pages), used_pages=kv.used_pages))
    requests = sorted(generate_requests(WORK, DEFAULT_MODEL)[0], key=lambda request: request.arrival)
    prompts = {request.request_id: len(request.prompt_tokens) for request in requests}
    tokens = {request.request_id: list(request.prompt_tokens) for request in requests}
    scheduler = ContinuousBatchScheduler(BUSY.max_running, kv=kv, preemption="swap")
    recorder.header(engine="0", backend="none", settings=ENGINE_SHAPE.dump(BUSY), model=MODEL_SHAPE.dump(DEFAULT_MODEL),
                    page_bytes=1, num_pages=BUSY.num_pages, weight_bytes=0, scenario="200 requests")
    while requests or not scheduler.idle:
        while requests and requests[0].arrival <= recorder.steps:
            recorder.submitted(requests[0])
            scheduler.submit(requests.pop(0))
        with recorder.holding_back():
            decision = scheduler.step(BUSY.budget_tokens)
            recorder.planned(decision, decision.scheduled_tokens, kv)
        recorder.step_completed()
        for chunk in decision.chunks:
            if chunk.start + chunk.count == len(tokens[chunk.request_id]):
                scheduler.sequence(chunk.request_id).tokens.append(2)  # what the chunk yields
        scheduler.complete_step()
        ends = {chunk.request_id: chunk.start + chunk.count for chunk in decision.chunks}
        for name in [name for name, end in ends.items() if end == len(tokens[name])]:
            tokens[name].append(2)
            number = len(tokens[name]) - prompts[name]
            recorder.event("token", request=name, index=number - 1, token=2, text="a")
            if not scheduler.is_live(name):
                recorder.event("finish", request=name, reason="length", tokens=number)
    return list(recorder.timeline.events)


class BrowserCase(unittest.TestCase):
    """One browser for a class, the report opened afresh for each test; the console must stay silent."""

    browser: Browser
    place = ""

    @staticmethod
    def events() -> list[Event]:
        raise NotImplementedError

    @classmethod
    def setUpClass(cls) -> None:
        if None in programs() and os.environ.get("P07_REQUIRE_EXTRAS") != "1":
            raise unittest.SkipTest("SKIPPED: needs chromium and chromedriver on the PATH")
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.path = Path(folder.name) / "report.html"
        write_report(cls.events(), cls.path)
        cls.browser = Browser()
        cls.addClassCleanup(cls.browser.close)

    def setUp(self) -> None:
        self.browser.prefer("light")
        self.browser.resize(1400, 1000)
        self.browser.open(self.path, self.place)

    def tearDown(self) -> None:
        self.assertEqual(self.browser.troubles(), [])

    def js(self, script: str, *arguments: object) -> Any:
        return self.browser.driver.execute_script(f"return {script}", *arguments)

    def find(self, selector: str) -> Any:
        return self.browser.driver.find_element("css selector", selector)

    def texts(self, selector: str) -> list[str]:
        return [node.text for node in self.browser.driver.find_elements("css selector", selector)]

    def click(self, selector: str) -> None:
        self.find(selector).click()
        self.browser.settle()

    def press(self, *keys: str) -> None:
        from selenium.webdriver.common.action_chains import ActionChains
        from selenium.webdriver.common.keys import Keys

        ActionChains(self.browser.driver).send_keys(*(getattr(Keys, key, key) for key in keys)).perform()
        self.browser.settle()

    def click_at(self, selector: str, x: float, y: float) -> None:
        """A click on a place in a picture, in CSS pixels from its corner."""
        from selenium.webdriver.common.action_chains import ActionChains

        node = self.find(selector)
        self.browser.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", node)
        box = node.rect
        ActionChains(self.browser.driver).move_to_element_with_offset(
            node, round(x - box["width"] / 2), round(y - box["height"] / 2)).click().perform()
        self.browser.settle()

    @property
    def frame(self) -> int:
        return int(self.js("report.frame"))


@needs("browser", "selenium")
class FixtureInBrowserTest(BrowserCase):
    events = staticmethod(fixture_events)

    def test_it_opens_where_pages_are_first_shared_and_says_who_waits_and_why(self) -> None:
        self.assertEqual(self.browser.driver.title, "tiny_model")
        self.assertEqual(self.find("#step-title").text, "Step 10")
        self.assertIn("late finds the first 24 tokens of its prompt computed: pages 11–13, shared with long",
                      " ".join(self.find("#story").text.split()))
        [waiting] = self.texts("#reasons .waiting")
        self.assertIn("middle", waiting)
        self.assertIn("needs 7 pages, 2 free; exact frees 3", waiting)

    def test_buttons_step(self) -> None:
        last = self.js("report.model.frames.length - 1")
        for button, frame in (("first", 0), ("forward", 1), ("forward", 2), ("back", 1), ("back", 0), ("back", 0),
                              ("last", last), ("forward", last)):
            self.click(f"#{button}")
            self.assertEqual(self.frame, frame, button)
        self.assertEqual(self.find("#readout").text.split(" /")[0], "End")
        self.assertEqual(self.find("#budget-text").text, "The run is over: every request has ended.")

    def test_keys_step(self) -> None:
        last = self.js("report.model.frames.length - 1")
        for key, frame in (("HOME", 0), ("ARROW_RIGHT", 1), ("ARROW_RIGHT", 2), ("ARROW_LEFT", 1), ("END", last),
                           ("ARROW_LEFT", last - 1)):
            self.press(key)
            self.assertEqual(self.frame, frame, key)

    def test_play_runs_to_the_end_and_pauses(self) -> None:
        from selenium.webdriver.support.ui import Select, WebDriverWait

        Select(self.find("#speed")).select_by_visible_text("60")
        self.js("document.activeElement.blur()")
        self.press("HOME", "SPACE")
        WebDriverWait(self.browser.driver, 60).until(lambda _: self.frame > 3)
        self.press("SPACE")
        self.assertFalse(self.js("report.playing"))
        stopped = self.frame
        self.browser.settle()
        self.assertEqual(self.frame, stopped)
        self.click("#play")
        WebDriverWait(self.browser.driver, 60).until(lambda _: self.js("report.now.end && !report.playing"))

    def test_the_slider_scrubs(self) -> None:
        self.find("#scrub").click()  # its middle
        self.browser.settle()
        self.assertAlmostEqual(self.frame, self.js("(report.model.frames.length - 1) / 2"), delta=2)
        self.press("ARROW_RIGHT")  # the page's own key, once
        self.assertEqual(self.frame, int(self.find("#scrub").get_attribute("value")))

    def test_the_gantt_chart_scrubs_and_follows(self) -> None:
        x, y, request = self.js("""(() => {
            const chart = report.gantt.picture;
            const row = chart.rows.findIndex((request) => report.model.requests[request].id === 'middle');
            return [chart.x(10.5), chart.y(row + 0.5, report.gantt), chart.rows[row]];
        })()""")
        self.click_at("#gantt", x, y)
        self.assertEqual((self.frame, self.js("report.followedRequest")), (10, request))
        self.assertIn("middle", self.find("#story-title").text)

    def test_a_request_can_be_followed(self) -> None:
        self.click("#reasons button[data-request='0']")
        self.assertEqual(self.find("#story-title").text, "The story of exact")
        self.assertEqual(self.find("[data-fact=pagesNow]").text, "pages 0, 1, 19")
        self.assertEqual(self.find("[data-fact=shared]").text, "never shared a page")
        pages = self.js("[...Array(20).keys()].filter((page) => report.followsPage(page))")
        self.assertEqual(pages, [0, 1, 19])
        story = " ".join(self.texts("#story li"))
        for words in ("arrives with a prompt of 16 tokens; at most 24 new ones", "computes 16 prompt tokens in 3 steps",
                      "decodes 23 tokens", "ends (all tokens) with 24 tokens"):
            self.assertIn(words, story)
        self.press("ARROW_DOWN")
        self.assertEqual(self.find("#story-title").text, "The story of across")
        self.press("ESCAPE")
        self.assertEqual(self.find("#story-title").text, "What happened")

    def test_why_a_request_waited_is_in_its_story(self) -> None:
        self.browser.open(self.path, "step=0&request=short")
        waits = [text for text in self.texts("#story li") if "waits" in text]
        self.assertIn("3–5", waits[0])
        self.assertIn("short waits: needs 1 page, 0 free; across frees 7 at its end", waits[0])

    def test_a_page_can_be_followed(self) -> None:
        x, y, width, height = self.js("report.pool.picture.box(2, report.pool)")
        self.click_at("#pool", x + width / 2, y + height / 2)
        self.assertEqual(self.find("#story-title").text, "The story of page 2")
        self.assertIn("across", self.find("#owners").text)
        self.assertIn("reference count 1", self.find("#owners").text)
        self.assertIn("across", self.texts("#story li")[0])
        self.click(".chip[data-page='0']")
        self.assertEqual(self.find("#story-title").text, "The story of page 0")
        self.assertIn("exact", self.find("#owners").text)

    def test_moments_lead_to_their_step(self) -> None:
        self.press("HOME")
        [preempted] = [node for node in self.browser.driver.find_elements("css selector", "#story button")
                       if node.text.split() and "long preempted: cancelled needs a page" in node.text]
        preempted.click()
        self.assertEqual(self.frame, 6)

    def test_chinese_and_back(self) -> None:
        self.click("#language")
        self.assertEqual(self.js("document.documentElement.lang"), "zh-CN")
        [waiting] = self.texts("#reasons .waiting .why")
        self.assertEqual(waiting, "等待：需要 7 页，空闲 2 页；exact 结束时交回 3 页，最多还要 16 个词元")
        self.assertIn("页池", self.find("#pool-card").text)
        self.assertEqual(self.texts("main [data-word], nav [data-word]").count(""), 0)
        self.press("l")
        self.assertEqual(self.js("document.documentElement.lang"), "en")

    def test_dark_where_the_system_is_and_where_it_is_asked_for(self) -> None:
        def paper() -> list[int]:
            colour = self.js("getComputedStyle(document.body).backgroundColor")
            return [int(part) for part in colour[4:-1].split(",")]

        def drawn() -> str:
            return str(self.js("report.pool.layers[0].toDataURL()"))

        light = drawn()
        self.assertGreater(min(paper()), 200)
        self.browser.prefer("dark")
        self.browser.settle()
        self.assertLess(max(paper()), 60)
        self.assertNotEqual(drawn(), light)  # the canvases, too
        self.click("#theme")
        self.assertGreater(min(paper()), 200)
        self.assertEqual(drawn(), light)

    def test_nothing_sticks_out_on_a_phone(self) -> None:
        self.browser.resize(390, 844, mobile=True)
        for place in ("step=3", "step=24&request=middle", "step=24&page=3&lang=zh"):
            self.browser.open(self.path, place)
            self.assertEqual(self.js("document.documentElement.scrollWidth"), 390, place)
            self.assertEqual(self.js("[...document.querySelectorAll('section')].filter((card) => "
                                     "card.scrollWidth > card.clientWidth).map((card) => card.id)"), [], place)

    def test_no_control_lies_under_another_at_any_width(self) -> None:
        """F040."""
        boxes = ("[...document.querySelectorAll('header button, header p, h1, nav button, nav input, nav select, nav "
                 "output, .filters > *')].filter((node) => node.offsetParent && node.tagName !== 'DATALIST').map("
                 "(node) => { const box = node.getBoundingClientRect(); "
                 "return [node.id, box.left, box.top, box.right, box.bottom]; })")
        for width in (320, 360, 390, 768, 1280):
            self.browser.resize(width, 844, mobile=width < 700)
            for place in ("step=100", "step=100&lang=zh"):
                self.browser.open(self.path, place)
                self.assertLessEqual(self.js("document.documentElement.scrollWidth"), width, place)
                found = self.js(boxes)
                self.assertGreater(len(found), 12)
                for one, left, _, right, _ in found:
                    self.assertTrue(left >= -0.5 and right <= width + 0.5, (one, width))
                for one, other in combinations(found, 2):
                    apart = [one[3] - other[1], other[3] - one[1], one[4] - other[2], other[4] - one[2]]
                    self.assertLessEqual(min(apart), 0.5, (one, other, width, place))

    def test_the_first_look_explains_itself(self) -> None:
        """F042: a sentence for the run, and a hint at each word, by pointer and by key, in both languages."""
        self.assertEqual(self.find("#lead").text,
                         "2 requests had to wait, at longest 13 steps; 4 were preempted and came back.")
        self.assertEqual(self.texts("#about .term"), ["fcfs", "continuous", "recompute", "prefix sharing"])
        self.assertFalse(self.find("#tip").is_displayed())
        self.js("document.querySelector('[data-term=recompute]').focus()")
        self.assertEqual(self.find("#tip").text,
                         "A preempted request gives up its pages and computes its tokens again later.")
        self.js("document.activeElement.blur()")
        self.assertFalse(self.find("#tip").is_displayed())
        self.click("#language")
        self.assertEqual(self.find("#lead").text, "2 个请求等待过，最久 13 步；4 个被抢占，之后回来。")
        self.find("[data-term=fcfs]").click()
        self.assertEqual(self.find("#tip").text, "先来先服务：请求按到达的顺序获准运行。")
        self.assertEqual(self.js("Object.keys(HINTS.en).filter((key) => !HINTS.zh[key]).length"), 0)
        self.assertEqual(self.js("Object.keys(WORDS.en).filter((key) => !WORDS.zh[key]).length"), 0)

    def test_preemptions_are_found(self) -> None:
        self.press("HOME")
        self.press("p")
        self.assertEqual(self.frame, 6)
        frames = [self.frame]
        while not frames[1:] or frames[-1] != 6:
            self.click("#next-preempted")
            frames.append(self.frame)
        counts = self.js("report.model.frames.map((each) => (each.preempted || []).length)")
        self.assertEqual(frames[:-1], [frame for frame, count in enumerate(counts) if count])

    def test_what_is_listed_can_be_chosen(self) -> None:
        """F041: by kind, and by request."""
        from selenium.webdriver.support.select import Select
        everything = self.js("report.stories.notable.length")
        counts = {}
        for kind in ("waits", "preempted", "sharing", "ends", "all"):
            Select(self.find("#kinds")).select_by_value(kind)
            self.browser.settle()
            counts[kind] = len(self.texts("#story li"))
        self.assertEqual(counts["all"], everything)
        self.assertEqual(sum(counts[kind] for kind in ("waits", "preempted", "sharing", "ends")), everything)
        self.assertTrue(all(0 < count < everything for kind, count in counts.items() if kind != "all"), counts)
        for words, title in (("mid", "The story of middle"), ("short", "The story of short"), ("", "What happened")):
            self.js("report.find(arguments[0])", words)
            self.assertEqual(self.find("#story-title").text, title)
        self.js("report.find('nobody')")
        self.assertEqual(self.find("#find").get_attribute("aria-invalid"), "true")
        self.find("#find").send_keys("lt")  # letters that are keys elsewhere
        self.assertEqual(self.js("document.documentElement.lang"), "en")

    def test_the_address_is_the_place(self) -> None:
        self.browser.open(self.path, "step=24&request=tail&theme=dark&lang=zh")
        self.assertEqual(self.find("#story-title").text, "tail 的经历")
        self.assertEqual((self.frame, self.js("document.documentElement.dataset.theme")), (24, "dark"))
        self.press("ARROW_RIGHT")
        from selenium.webdriver.support.ui import WebDriverWait
        WebDriverWait(self.browser.driver, 30).until(lambda _: "step=25" in self.js("location.hash"))

    def test_every_reason_has_a_chinese_form(self) -> None:
        self.assertEqual(self.js(UNTRANSLATED), [])

    def test_used_pages_are_those_the_engine_counted(self) -> None:
        self.assertEqual(self.js(WRONG_COUNTS), [])


# Frames where the viewer sees another number of used pages than the engine told.
WRONG_COUNTS = """report.model.frames.filter((frame, number) => {
    report.seek(number);
    return !frame.end && report.pages.size !== frame.used;
}).map((frame) => frame.step)"""
UNTRANSLATED = """(() => {
    setLanguage("zh");
    const reasons = report.model.frames.flatMap((frame) => [...reasonsOf(report.model, frame).values()]);
    return [...new Set(reasons.filter((reason) => reasonText(reason) === reason))];
})()"""


@needs("browser", "selenium")
class SharingInBrowserTest(BrowserCase):
    events = staticmethod(sharing_events)

    def test_which_pages_a_request_shared(self) -> None:
        found = "pages 0–2"  # two tokens each, of six that are equal
        self.assertEqual(self.js("report.model.requests[report.stories.notable[0].request].id"), "two")
        self.assertIn(f"{found}, shared with one", self.find("#story .now").text)
        self.click("#reasons button[data-request='1']")
        self.assertIn(f"{found} with one", self.find("[data-fact=shared]").text)
        self.assertEqual(self.texts(".chip.shared")[0].split("×")[0], "0")

    def test_a_shared_page_names_its_owners_and_their_number(self) -> None:
        self.click(".chip.shared[data-page='0']")
        owners = self.texts("#owners .owner")
        self.assertGreaterEqual(len(owners), 2)
        self.assertIn("one", owners)
        self.assertIn(f"reference count {len(owners)}", self.find("#owners").text)

    def test_markup_in_an_id_is_text(self) -> None:
        self.assertIn("请求</script>", self.find("#story").text)
        self.assertEqual(self.js("document.querySelectorAll('script').length"), 2)

    def test_used_pages_are_those_the_engine_counted(self) -> None:
        self.assertEqual(self.js(WRONG_COUNTS), [])


@needs("browser", "selenium")
class LongRunInBrowserTest(BrowserCase):
    events = staticmethod(long_events)

    def test_it_is_a_long_run(self) -> None:
        self.assertGreater(self.js("report.model.frames.length"), 2_000)
        self.assertEqual(self.js("report.model.requests.length"), 200)

    def test_a_jump_replays_few_frames_and_paints_what_changed(self) -> None:
        dice = random.Random(SEED)
        frames = [dice.randrange(self.js("report.model.frames.length")) for _ in range(40)]
        seek = "(frame) => { report.seek(frame); return report.replay.replayed; }"
        replayed = self.js(f"arguments[0].map({seek})", frames)
        self.assertLess(max(replayed), self.js("SPACING"))
        self.js("report.seek(700)")
        charts = "report.charts.reduce((sum, {panel}) => sum + panel.painted, 0)"
        before = self.js(f"[{charts}, report.gantt.painted]")
        steps = self.js(f"arguments[0].map({seek})", list(range(701, 731)))
        self.assertLessEqual(max(steps), 1)
        after = self.js(f"[{charts}, report.gantt.painted]")
        self.assertEqual(after[0], before[0])  # charts: only the playhead moved
        self.assertLessEqual(after[1] - before[1], 10)  # the Gantt chart: only where it scrolled

    def test_a_jump_arrives_where_walking_does(self) -> None:
        self.assertEqual(self.js("""(() => {
            const entries = (map) => [...map].sort((a, b) => a[0] - b[0]);
            const picture = (state) => JSON.stringify([entries(state.tables), entries(state.computed), state.waiting,
                [...state.published].sort(), [...state.swapped].sort(), [...state.touched].sort()]);
            const walking = new State(), wrong = [], {frames} = report.model;
            frames.forEach((frame, number) => {
                walking.apply(frame, report.model);
                report.replay.seek((number * 7919) % frames.length);
                if (picture(walking) !== picture(report.replay.seek(number))) wrong.push(number);
            });
            return wrong;
        })()"""), [])

    def test_a_crowd_that_waits_for_one_reason_is_one_sentence(self) -> None:
        """F041."""
        waits, told = self.js("[report.stories.waits.length, report.stories.notable.filter((entry) => "
                              "['wait', 'together', 'preempt'].includes(entry.kind))]")
        together = [entry for entry in told if entry["kind"] == "together"]
        self.assertTrue(together)
        self.assertEqual(sum(entry.get("n", 0) + 1 for entry in told), waits)  # nobody is left out
        self.assertTrue(all(entry["n"] >= 2 for entry in together))

    def test_lists_stay_short(self) -> None:
        self.js("report.seek(900)")
        self.assertLess(self.js("document.querySelectorAll('#story li').length"), 200)
        self.assertLess(self.js("document.querySelectorAll('*').length"), 4_000)

    def test_every_reason_has_a_chinese_form(self) -> None:
        self.assertEqual(self.js(UNTRANSLATED), [])


if __name__ == "__main__":
    unittest.main()
