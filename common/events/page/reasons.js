// Words that several scenes share: the kinds of what a step computes, and why a request waits (in
// English: REASONS of frames.py). Letters are the second mark beside the colour; those of reasons
// are none of a to f, as the requests of the films are named.
const {store, t} = Watch;
Watch.kinds = {
  prompt: {letter: "P", fill: "var(--prompt)", words: ["prompt", "prompt"]},
  decode: {letter: "·", fill: "var(--decode)", words: ["decode", "解码"]},
  recomputed: {letter: "R", fill: "var(--preempted)", words: ["recomputed", "重算"]},
  draft: {letter: "D", fill: "var(--ngram)", words: ["draft", "草稿"]},
  accepted: {letter: "+", fill: "var(--accepted)", words: ["draft accepted", "草稿被接受"]},
  rejected: {letter: "×", fill: "var(--rejected)", words: ["draft rejected", "草稿被拒绝"]},
  discarded: {letter: "–", fill: "var(--waste)", words: ["computed in vain", "白算"]},
};
Watch.reasons = {
  budget: {letter: "t", short: ["no tokens left", "预算用完"], chinese: "这一步的 token 预算用完了"},
  blocks: {letter: "m", short: ["no blocks", "块不够"], chinese: "空闲的 KV 块不够，或要留给正在运行的请求"},
  preempting: {letter: "v", short: ["preemption", "本步有抢占"], chinese: "抢占过的一步不再准入"},
  seat: {letter: "s", short: ["no slot", "席位已满"], chinese: "运行中的请求数已到上限（max_num_seqs）"},
  constraint: {letter: "h", short: ["held back", "受限"],
    chinese: "受规则限制：例如静态批处理、长 prompt 太多、适配器太多"},
  parent: {letter: "p", short: ["waits to share", "等待共享"], chinese: "另一个请求正在计算它可以共享的那个块"},
  remote_kv: {letter: "k", short: ["KV on its way", "KV 传输中"], chinese: "它的 KV 正从其他存储层传来"},
  grammar: {letter: "g", short: ["grammar compiling", "语法编译中"], chinese: "它的语法正在编译"},
  pending: {letter: "u", short: ["token in flight", "token 在途"], chinese: "被抢占时它还有一个 token 正在计算"},
  turn: {letter: "o", short: ["decodes' turn", "轮到解码"], chinese: "这一步轮到解码的请求"},
  enough: {letter: "n", short: ["not tried", "未尝试"], chinese: "前面跳过的请求太多，后面的不再尝试"},
  front: {letter: "x", short: ["front waits", "队首在等"], chinese: "先来先服务：队首的请求放不下，或受规则限制"},
  "": {letter: "w", short: ["not tried", "未尝试"], chinese: "这一步没有尝试它",
    english: "it was not tried in this step"},
};
for (const [kind, {words}] of Object.entries(Watch.kinds)) Watch.words({[`kind.${kind}`]: words});
for (const [reason, row] of Object.entries(Watch.reasons)) {
  const {short, chinese, english = Watch.settings.reasons[reason]} = row;
  Watch.words({[`short.${reason}`]: short, [`reason.${reason}`]: [english, chinese]});
}
Watch.words({
  "rule.long": [
    "the limit of concurrent long prompts is reached (max_long_partial_prefills is {n})",
    "同时进行的长 prompt 已到上限（max_long_partial_prefills = {n}）"],
  "rule.adapter": ["no slot is free for its adapter (max_loras is {n})",
    "没有空闲的适配器槽（max_loras = {n}）"],
  "list.none": ["none", "无"],
  "list.comma": [", ", "，"],
  "list.and": ["; ", "；"],
  "close": ["Close", "关闭"],
  "brings.adapter": ["adapter {name}", "适配器 {name}"],
  "brings.grammar": ["grammar {name}", "语法 {name}"],
});

// A request by its colour and its label, and a note: made once, and filled for one or another.
Watch.chip = (attributes) => Watch.h("button", {class: "chip", ...attributes},
  Watch.h("i"), Watch.h("b"), Watch.h("span", {class: "quiet"}));
Watch.fillChip = (chip, id, note, title) => {
  const [swatch, name, words] = chip.children;
  swatch.style.background = id === null ? "" : Watch.colour(id);
  Watch.say(name, id === null ? "" : Watch.label(id));
  Watch.say(words, note);
  if (chip.title !== title) chip.title = title;
  chip.setAttribute("aria-pressed", String(id !== null && store.request === id));
};

// What there is to say, in one line.
Watch.joined = (...parts) => parts.filter(Boolean).join(" · ");

// The first of many.
Watch.firstOf = (items, most) =>
  [...items.slice(0, most), ...(items.length > most ? ["…"] : [])].join(", ");

// The adapter and the grammar of a request, or of a row that has them; of most neither.
Watch.brings = (request) => Watch.joined(...["adapter", "grammar"].map((what) =>
  request[what] && t(`brings.${what}`, {name: request[what]})));
Watch.tagOf = (id) => store.films.map((film) => film.byId.get(id)?.tag).find(Boolean) ?? "";

// A rule by its name, where the settings of the run, or of the film, tell which one it can be.
Watch.reasonWords = ({config}, reason) => {
  if (reason !== "constraint") return t(`reason.${reason}`);
  const {rule} = (Watch.isOwnFilm() && Watch.settings.film) || {};
  if (rule?.[0]) return Watch.inLanguage(rule);
  const {max_long_partial_prefills: n} = config;
  if (n) return t("rule.long", {n});
  const takesAdapters = config.adapters || config.max_loras;
  return takesAdapters ? t("rule.adapter", {n: config.max_loras ?? 4}) : t("reason.constraint");
};

// The cells of a request in a step by their result: draft tokens accepted and rejected, and a
// token that was computed for a request which had ended meanwhile.
Watch.verdicts = (facts, id) => {
  const cells = facts?.cells.get(id) ?? [];
  const {verified, discarded} = facts?.result ?? {};
  const [accepted, rejected] = verified?.[id] ?? [0, 0];
  if (discarded && id in discarded) return cells.map((cell) => ({...cell, kind: "discarded"}));
  return cells.flatMap((cell) => {
    if (cell.kind !== "draft" || accepted + rejected === 0) return [cell];
    const parts = [
      ["accepted", cell.start, accepted], ["rejected", cell.start + accepted, rejected],
    ];
    return parts.filter(([, , n]) => n > 0)
      .map(([kind, start, numTokens]) => ({request: id, kind, start, numTokens}));
  });
};
