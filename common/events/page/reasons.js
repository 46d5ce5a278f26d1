// Words that several scenes share: why a request waits (English: REASONS of frames.py, checked by
// a test), and the kinds of what a step computes. Letters are the second mark beside the colour;
// those of reasons are none of a to f, as the requests of the films are named.
const {store, t} = Watch;
Watch.words({
  "reason.budget": ["the tokens of this step were spent", "这一步的 token 预算用完了"],
  "reason.blocks": ["too few KV blocks were free, or those left are kept for running requests",
    "空闲的 KV 块不够，或要留给正在运行的请求"],
  "reason.preempting": ["a step that preempts admits none", "抢占过的一步不再准入"],
  "reason.seat": ["every batch slot is taken (max_num_seqs)", "运行中的请求数已到上限（max_num_seqs）"],
  "reason.constraint": ["a rule held it back: a static batch, too many long prompts, an adapter",
    "受规则限制：例如静态批处理、长 prompt 太多、适配器太多"],
  "reason.parent": ["another request is computing the block that it could share",
    "另一个请求正在计算它可以共享的那个块"],
  "reason.remote_kv": ["its KV is on its way from a tier or a store", "它的 KV 正从其他存储层传来"],
  "reason.grammar": ["its grammar is being compiled", "它的语法正在编译"],
  "reason.pending": ["a token of it was still in flight when it was preempted",
    "被抢占时它还有一个 token 正在计算"],
  "reason.turn": ["this step was for decoding requests", "这一步轮到解码的请求"],
  "reason.enough": ["so many requests were skipped before it that no other was tried",
    "前面跳过的请求太多，后面的不再尝试"],
  "reason.": ["it was not tried in this step", "这一步没有尝试它"],
  "rule.long": [
    "the limit of concurrent long prompts is reached (max_long_partial_prefills is {n})",
    "同时进行的长 prompt 已到上限（max_long_partial_prefills = {n}）"],
  "rule.adapter": ["no slot is free for its adapter (max_loras is {n})",
    "没有空闲的适配器槽（max_loras = {n}）"],
  "short.budget": ["no tokens left", "预算用完"],
  "short.blocks": ["no blocks", "块不够"],
  "short.preempting": ["preemption", "本步有抢占"],
  "short.seat": ["no slot", "席位已满"],
  "short.constraint": ["held back", "受限"],
  "short.parent": ["waits to share", "等待共享"],
  "short.remote_kv": ["KV on its way", "KV 传输中"],
  "short.grammar": ["grammar compiling", "语法编译中"],
  "short.pending": ["token in flight", "token 在途"],
  "short.turn": ["decodes' turn", "轮到解码"],
  "short.enough": ["not tried", "未尝试"],
  "short.": ["not tried", "未尝试"],
  "brings.adapter": ["adapter {name}", "适配器 {name}"],
  "brings.grammar": ["grammar {name}", "语法 {name}"],
  "kind.prompt": ["prompt", "prompt"],
  "kind.decode": ["decode", "解码"],
  "kind.recomputed": ["recomputed", "重算"],
  "kind.draft": ["draft", "草稿"],
  "kind.accepted": ["draft accepted", "草稿被接受"],
  "kind.rejected": ["draft rejected", "草稿被拒绝"],
  "kind.discarded": ["computed in vain", "白算"],
});

Watch.letters = {
  prompt: "P", decode: "·", recomputed: "R", draft: "D", accepted: "+", rejected: "×",
  discarded: "–",
};
Watch.reasonLetters = {
  budget: "t", blocks: "m", preempting: "v", seat: "s", constraint: "h", parent: "p",
  remote_kv: "k", grammar: "g", pending: "u", turn: "o", enough: "n", "": "w",
};

// The adapter and the grammar of a request, or of a row that has them; of most neither.
const BRINGS = ["adapter", "grammar"];
Watch.brings = (request) => BRINGS.filter((what) => request[what])
  .map((what) => t(`brings.${what}`, {name: request[what]})).join(" · ");
Watch.tagOf = (id) => {
  const found = store.films.map((film) => film.byId.get(id)?.tag).find(Boolean);
  return found ?? "";
};

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
