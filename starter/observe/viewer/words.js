// Every word the page shows, in English and in Chinese, and the engine's reasons put into Chinese.
//
//     say("pages", {n: 3})            "3 pages"       {name} is replaced by a value; "one|many" is chosen by n
//     reasonText("waits: needs 1 …")  the sentence itself, or its Chinese form where the pattern is known
"use strict";

const WORDS = {
  en: {
    title: "A run, step by step", about: "{steps} · {requests} · {pages} of {size} tokens · budget {budget} tokens a step",
    steps: "{n} step|{n} steps", requests: "{n} request|{n} requests", pages: "{n} page|{n} pages", pageList: "page {list}|pages {list}",
    tokens: "{n} token|{n} tokens", sharing: "prefix sharing", noCache: "no KV cache",
    first: "First step", back: "Step back", play: "Play", pause: "Pause", forward: "Step forward", last: "To the end",
    scrub: "Step", speed: "Steps per second", language: "中文", languageLabel: "Switch to Chinese", theme: "Light or dark",
    help: "Keys", zoomIn: "Zoom in", zoomOut: "Zoom out",
    gantt: "Requests over time", pool: "Page pool", tables: "Block tables", charts: "Measured",
    stepNumber: "Step {step}", end: "End", clock: "at {time}",
    waiting: "waiting", prefill: "prefill", decode: "decode", preempted: "preempted", idle: "waits its turn",
    swapped: "swapped out", outside: "outside the engine",
    free: "free", cached: "cached", used: "used", shared: "shared", written: "written now", reserved: "reserved, empty",
    computes: "computes {n} of {budget} budget tokens", nothing: "Nothing is computed in this step.",
    over: "The run is over: every request has ended.",
    cut: "The timeline breaks off here; {n} request has not ended.|The timeline breaks off here; {n} requests have not ended.", more: "and {n} more", slots: "{a} of {b} slots",
    story: "What happened", storyOf: "The story of {id}", pageStory: "The story of page {page}",
    hint: "Click a request or a page to follow it.", close: "Stop following",
    poolCounts: "{used} used · {shared} shared · {cached} cached · {free} free",
    submitted: "{id} arrives with a prompt of {count}; at most {max} new ones",
    waits: "{id} {reason}", waitsFor: " ({n} step)| ({n} steps)", queued: "waits in the queue, {n} before it",
    finds: "{id} finds the first {count} of its prompt computed: {pages}, shared with {others}",
    findsCached: "{id} finds the first {count} of its prompt computed: {pages}, still cached",
    forks: "{id} starts as another sample of {parent} on its {pages}",
    takes: "{id} takes {pages}", copies: "{id} is about to write to shared page {from}: it gets a copy, page {to}",
    prefills: "{id} computes {n} prompt token|{id} computes {n} prompt tokens", prefillsIn: " in {n} step| in {n} steps", again: "{id} computes {n} token again|{id} computes {n} tokens again",
    decodes: "{id} decodes {n} token|{id} decodes {n} tokens", swapsOut: "{id} moves to host memory and gives up {pages}",
    swapsIn: "{id} comes back from host memory into {pages}",
    cancel: "{id} is cancelled", ends: "{id} ends ({reason}) with {n} token|{id} ends ({reason}) with {n} tokens",
    error: "{id} fails: {error}", refuse: "{id} is refused: {error}", fault: "fault on purpose: {kind} {about}",
    holds: "{id} holds {pages} from outside", evicts: "cached content is given up for it: {pages}",
    stop: "end token", length: "all tokens", cancelled: "cancelled",
    prompt: "prompt", output: "output", times: "times", pagesNow: "pages now", neverShared: "never shared a page", sharesWith: "{pages} with {others}",
    pageFree: "free", pageCached: "cached: its content can still be found",
    pageTip: "page {page} · {state}", fill: "{n} of {size} slots filled", refs: "reference count {n}",
    chartPages: "pages in use", chartBatch: "batch utilization", chartEmpty: "empty slots (fragmentation)",
    chartActive: "running, waiting", chartTtft: "time to first token, median", chartTpot: "time per output token, median",
    mean: "mean {value}", peak: "peak {value}", meanSlots: "mean {value} slots",
    find: "Follow the request of this id", kinds: "What is listed", allKinds: "everything", kindWaits: "waits",
    kindPreempted: "preemptions, swaps", kindSharing: "sharing, copies", kindEnds: "ends, faults", nextPreempted: "Next preemption",
    together: "{id} and {n} other: {reason}|{id} and {n} others: {reason}",
    lead: "{waits}; {preempts}.", leadWaits: "{n} request had to wait, at longest {longest}|{n} requests had to wait, at longest {longest}",
    leadNoWait: "No request had to wait", leadPreempts: "{n} was preempted and came back|{n} were preempted and came back", leadNoPreempt: "none was preempted",
    keys: "Space play or pause · ← → one step · Shift ten · Home End · ↑ ↓ follow the next request · P next preemption · Esc stop following · + − zoom · L language · T theme",
  },
  zh: {
    title: "逐步回放", about: "{steps} · {requests} · {pages}，每页 {size} 个词元 · 每步预算 {budget} 个词元",
    steps: "{n} 步", requests: "{n} 个请求", pages: "{n} 页", pageList: "第 {list} 页", tokens: "{n} 个词元", sharing: "前缀共享", noCache: "无 KV 缓存",
    first: "回到开头", back: "上一步", play: "播放", pause: "暂停", forward: "下一步", last: "到结尾",
    scrub: "步", speed: "每秒步数", language: "English", languageLabel: "切换到英文", theme: "浅色或深色",
    help: "按键", zoomIn: "放大", zoomOut: "缩小",
    gantt: "请求时间线", pool: "页池", tables: "块表", charts: "指标",
    stepNumber: "第 {step} 步", end: "结束", clock: "{time}",
    waiting: "等待", prefill: "预填充", decode: "解码", preempted: "被抢占", idle: "轮候",
    swapped: "已换出", outside: "引擎之外",
    free: "空闲", cached: "缓存", used: "占用", shared: "共享", written: "正在写入", reserved: "已预留，未写",
    computes: "计算 {n} 个词元，预算 {budget}", nothing: "这一步不计算任何词元。",
    over: "运行结束：所有请求均已完成。", cut: "时间线到此中断；还有 {n} 个请求未完成。", more: "还有 {n} 个", slots: "槽位 {a} / {b}",
    story: "发生了什么", storyOf: "{id} 的经历", pageStory: "第 {page} 页的经历",
    hint: "点击一个请求或一页，即可跟踪它。", close: "停止跟踪",
    poolCounts: "占用 {used} · 共享 {shared} · 缓存 {cached} · 空闲 {free}",
    submitted: "{id} 到达：提示 {count}，最多生成 {max} 个",
    waits: "{id} {reason}", waitsFor: "（{n} 步）", queued: "排队等待，前面还有 {n} 个",
    finds: "{id} 的提示中前 {count}已算好：{pages}，与 {others} 共享",
    findsCached: "{id} 的提示中前 {count}已算好：{pages}，仍在缓存中",
    forks: "{id} 作为 {parent} 的另一个样本，从它的{pages}开始",
    takes: "{id} 取得{pages}", copies: "{id} 要写入共享的第 {from} 页：先复制为第 {to} 页",
    prefills: "{id} 计算 {n} 个提示词元", prefillsIn: "，分 {n} 步", again: "{id} 重新计算 {n} 个词元",
    decodes: "{id} 解码 {n} 个词元", swapsOut: "{id} 换出到主机内存，交回{pages}",
    swapsIn: "{id} 从主机内存换回，放入{pages}",
    cancel: "{id} 被取消", ends: "{id} 结束（{reason}），共 {n} 个词元",
    error: "{id} 失败：{error}", refuse: "{id} 被拒绝：{error}", fault: "故意注入的故障：{kind} {about}",
    holds: "{id} 在引擎之外占用{pages}", evicts: "为它放弃缓存内容：{pages}",
    stop: "结束词元", length: "词元已满", cancelled: "已取消",
    prompt: "提示", output: "输出", times: "时间", pagesNow: "当前页", neverShared: "从未共享任何页", sharesWith: "{pages}，与 {others}",
    pageFree: "空闲", pageCached: "缓存：内容仍可被找到",
    pageTip: "第 {page} 页 · {state}", fill: "{size} 个槽位已填 {n} 个", refs: "引用计数 {n}",
    chartPages: "占用的页", chartBatch: "批利用率", chartEmpty: "空槽位（内部碎片）",
    chartActive: "运行、等待", chartTtft: "首词元时间（中位数）", chartTpot: "每词元时间（中位数）",
    mean: "平均 {value}", peak: "峰值 {value}", meanSlots: "平均 {value} 个",
    find: "跟踪这个编号的请求", kinds: "列出什么", allKinds: "全部", kindWaits: "等待", kindPreempted: "抢占、换页",
    kindSharing: "共享、复制", kindEnds: "结束、故障", nextPreempted: "下一次抢占", together: "{id} 和另外 {n} 个：{reason}",
    lead: "{waits}；{preempts}。", leadWaits: "{n} 个请求等待过，最久 {longest}", leadNoWait: "没有请求需要等待",
    leadPreempts: "{n} 个被抢占，之后回来", leadNoPreempt: "没有发生抢占",
    keys: "空格 播放/暂停 · ← → 单步 · Shift 十步 · Home End 首尾 · ↑ ↓ 跟踪下一个请求 · P 下一次抢占 · Esc 停止跟踪 · + − 缩放 · L 语言 · T 主题",
  },
};

// What a word means. Keys are the engine's own words, or those of a legend.
const HINTS = {
  en: {
    fcfs: "First come, first served: requests are admitted in the order in which they arrived.",
    priority: "Higher priorities go first; a request that waits gains on them.", shortest: "The request with the fewest tokens left goes first; one that waits gains on it.",
    "prefill-first": "Prompts are computed before anything is decoded: kept as a bad example.",
    continuous: "Continuous batching: requests join and leave the batch in every step.", static: "Static batching: a batch ends as a whole before the next one begins.",
    none: "No batching: one request at a time.", recompute: "A preempted request gives up its pages and computes its tokens again later.",
    swap: "A preempted request moves its pages to host memory and brings them back later.",
    sharing: "Prompts that begin alike share the pages of that beginning.", noCache: "Without a KV cache the whole context is computed again for every token.",
    waiting: "In the queue: it lacks pages, a place in the batch, or budget.", prefill: "The prompt's tokens are computed, many in a step.",
    decode: "One new token a step.", preempted: "It had to give its pages to a request before it, and waits to go on.", idle: "It runs, but gets no tokens in this step.",
    used: "Slots that hold a key and a value.", written: "Slots that this step fills.", reserved: "Slots that are taken for tokens still to come.",
    shared: "A page in several block tables at once.", cached: "No request's page now, but its content can still be found by a prompt that begins alike.", free: "A page that holds nothing.",
  },
  zh: {
    fcfs: "先来先服务：请求按到达的顺序获准运行。", priority: "优先级高的先走；等待会缩小差距。", shortest: "剩余词元最少的先走；等待会缩小差距。",
    "prefill-first": "提示总是先于解码计算：留作反面例子。", continuous: "连续批处理：每一步都可以有请求加入或离开。", static: "静态批处理：一批全部结束，下一批才开始。",
    none: "不做批处理：一次一个请求。", recompute: "被抢占的请求交回页，以后重新计算它的词元。", swap: "被抢占的请求把页换到主机内存，以后再换回。",
    sharing: "开头相同的提示共享那一段的页。", noCache: "没有 KV 缓存：每生成一个词元都重算整个上下文。",
    waiting: "在队列中：缺页、缺位置，或缺预算。", prefill: "计算提示的词元，一步可以很多个。", decode: "每步一个新词元。",
    preempted: "它把页让给了前面的请求，等待继续。", idle: "正在运行，但这一步没有分到词元。", used: "已有键和值的槽位。", written: "这一步写入的槽位。",
    reserved: "为以后的词元预留的槽位。", shared: "同时在几个块表里的页。", cached: "现在不属于任何请求，但开头相同的提示仍能找到它的内容。", free: "不属于任何请求的页。",
  },
};

// The scheduler's sentences (scheduler.py) and their Chinese forms; one that is not here is shown as it is.
const REASONS = [
  [/^waits: needs (\d+) pages?, (\d+) free; (.+) frees (\d+) at its end, at most (\d+) tokens? away$/,
    "等待：需要 $1 页，空闲 $2 页；$3 结束时交回 $4 页，最多还要 $5 个词元"],
  [/^waits: needs (\d+) pages?, (\d+) free; no running request will free any: pages are held from outside$/,
    "等待：需要 $1 页，空闲 $2 页；没有运行中的请求会交回页：页被引擎之外占用"],
  [/^waits: (\d+) of at most (\d+) requests are running$/, "等待：已有 $1 个请求在运行，上限 $2 个"],
  [/^waits: (\d+) of (\d+) budget tokens are left after the decodes, and (\d+) prompts are already being computed$/,
    "等待：解码之后预算 $2 只剩 $1 个词元，已有 $3 个提示在计算"],
  [/^waits: no admission in a step that had to preempt$/, "等待：发生抢占的一步不接纳新请求"],
  [/^waits: static batching, the batch of (.+) must end first$/, "等待：静态批处理，要等 $1 这一批结束"],
  [/^waits: this step's budget is 0$/, "等待：这一步的预算为 0"],
  [/^waits: (.+) lacks pages and was overtaken (\d+) times, so the queue holds for it$/,
    "等待：$1 缺页且已被超越 $2 次，队列为它停下"],
  [/^waits for its turn: (\d+) requests want a part of the (\d+) budget tokens$/, "轮候：$1 个请求分享 $2 个词元的预算"],
  [/^preempted: (.+) needs a page and none is free; (.+) is last in order, gives back (\d+) pages? and will compute its (\d+) tokens again$/,
    "被抢占：$1 需要一页而没有空闲；$2 排在最后，交回 $3 页，以后重新计算 $4 个词元"],
  [/^preempted: (.+) needs a page and none is free; (.+) is last in order, gives back (\d+) pages? and keeps its (\d+) tokens in host pages$/,
    "被抢占：$1 需要一页而没有空闲；$2 排在最后，交回 $3 页，$4 个词元保留在主机页中"],
  [/^decodes position (\d+): token (\d+) of at most (\d+)$/, "解码位置 $1：第 $2 个词元，最多 $3 个"],
  [/^admitted; prefills positions (\d+) to (\d+) of (\d+)(?:, (\d+) left for later steps \(budget (\d+)\))?$/,
    (m) => `获准运行；预填充位置 ${m[1]} 到 ${m[2]}，共 ${m[3]}` + (m[4] ? `，${m[4]} 个留给后面的步（预算 ${m[5]}）` : "")],
  [/^prefills positions (\d+) to (\d+) of (\d+)(?:, (\d+) left for later steps \(budget (\d+)\))?$/,
    (m) => `预填充位置 ${m[1]} 到 ${m[2]}，共 ${m[3]}` + (m[4] ? `，${m[4]} 个留给后面的步（预算 ${m[5]}）` : "")],
];

let language = "en";

function setLanguage(name) {
  language = Object.hasOwn(WORDS, name) ? name : "en";
}

function say(key, values = {}) {
  const forms = WORDS[language][key].split("|");
  const form = forms.length > 1 && values.n !== 1 ? forms[1] : forms[0];
  return form.replace(/\{(\w+)\}/g, (whole, name) => (name in values ? values[name] : whole));
}

function reasonText(sentence) {
  if (language !== "zh") return sentence;
  for (const [pattern, form] of REASONS) {
    const match = pattern.exec(sentence);
    if (match) return typeof form === "function" ? form(match) : form.replace(/\$(\d)/g, (_, i) => match[i]);
  }
  return sentence;
}
