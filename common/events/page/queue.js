// Scene 4: who waits, in the order of service, and what the tokens of this step went to. All of it
// is as the plan of the step saw it; but at the end of a film that goes on, a request that has
// ended is in no list.
const {store, t, h} = Watch;
const MAX_ROWS = 60; // a longer queue is counted, not listed
Watch.words({
  "queue.waiting": ["Waiting: {n} (policy {policy})", "等待：{n}（策略 {policy}）"],
  "queue.running": ["Running: {n} of {slots} slots", "运行：{n}（上限 {slots}）"],
  "queue.more": ["and {n} more", "还有 {n} 个"],
  "queue.priority": ["priority {n}", "优先级 {n}"],
  "queue.key": ["key {key}", "排序键 {key}"],
  "queue.tokens": ["{n} tokens", "{n} 个 token"],
  "queue.budget": ["{used} of {budget} tokens used, {left} left over",
    "预算 {budget} 个 token，用了 {used} 个，剩 {left} 个"],
  "queue.all": ["Every waiting request was tried.", "等待的请求都尝试过了。"],
  "queue.empty": ["No request waited.", "没有请求等待。"],
  "queue.stop": ["{words}.", "{words}。"],
  "queue.no_plan": ["This step computed no plan.", "这一步没有执行计划。"],
});
const KINDS = ["decode", "prompt", "recomputed", "draft"]; // as the bar shows them, left to right

class Queue {
  constructor(root, view) {
    this.view = view;
    this.bar = h("div", {class: "bar", role: "img"});
    this.sum = h("p", {class: "bar-sum"});
    this.key = h("p", {class: "bar-key"});
    this.stop = h("p", {class: "stop"});
    this.waiting = makeList();
    this.running = makeList();
    root.classList.add("queue-body");
    root.append(this.bar, this.sum, this.key, this.stop,
      h("div", {class: "queue-lists"}, this.waiting.root, this.running.root));
  }

  draw() {
    const {facts, film} = this.view;
    const {isNow, state: {running: runs}} = this.view;
    const waits = film.waits(this.view.step);
    this.drawBar(facts);
    Watch.say(this.stop, stopWords(this.view, waits));
    fill(this.waiting, t("queue.waiting", {n: waits.size, policy: film.run.policy}),
      [...waits].map(([id, reason]) => this.waitingRow(id, reason)));
    const running = [...(facts?.cells.keys() ?? []), ...(facts?.idle ?? [])]
      .filter((id) => !isNow || runs.includes(id));
    fill(this.running, t("queue.running", {n: running.length, slots: film.run.max_num_seqs}),
      running.map((id) => ({id, note: this.note(id, tokenWords(facts.cells.get(id))), says: ""})));
  }

  // With what the request brings.
  note(id, words) {
    const request = this.view.request(id);
    return Watch.joined(request && Watch.brings(request), words);
  }

  waitingRow(id, reason) {
    const request = this.view.request(id);
    let note = t(`short.${reason}`);
    if (request?.order_key) note = `${t("queue.key", {key: request.order_key})} · ${note}`;
    else if (request?.priority) note = `${t("queue.priority", {n: request.priority})} · ${note}`;
    return {id, note: this.note(id, note), says: Watch.reasonWords(this.view.film.run, reason)};
  }

  drawBar(facts) {
    const cells = [...(facts?.cells.values() ?? [])].flat();
    const used = numTokensOf(cells);
    const budget = this.view.film.run.max_num_batched_tokens;
    const left = Math.max(0, budget - used);
    const sumOf = (one) => numTokensOf(cells.filter(({kind}) => kind === one));
    const shown = KINDS.map((kind) => [kind, sumOf(kind), t(`kind.${kind}`)]).filter(([, n]) => n);
    const segment = (kind, n) => h("span", {class: `fill-${kind}`, style: `flex: ${n} 1 0`},
      ...(n * 12 > budget ? [h("b", {}, String(n))] : []));
    this.bar.replaceChildren(...shown.map(([kind, n]) => segment(kind, n)));
    if (left) this.bar.append(segment("left", left));
    this.key.replaceChildren(...shown.map(([kind, n, name]) => h("span", {},
      h("i", {class: `key key-${kind}`}, h("b", {}, Watch.kinds[kind].letter)), `${name} ${n}`)));
    this.sum.textContent = t("queue.budget", {used, budget, left});
    const words = shown.map(([, n, name]) => `${name} ${n}`).join(", ");
    this.bar.setAttribute("aria-label", `${this.sum.textContent}: ${words}`);
  }
}

const numTokensOf = (cells) => cells.reduce((sum, {numTokens}) => sum + numTokens, 0);
const tokenWords = (cells = []) => t("queue.tokens", {n: numTokensOf(cells)});

// As the step is told in words, and no other sentence about the same.
function stopWords(view, waits) {
  const plan = view.facts?.plan;
  if (!plan) return t("queue.no_plan");
  if (plan.stop === null) return t(waits.size ? "queue.all" : "queue.empty");
  const told = Watch.sentencesOf(view).find(({key}) => key.startsWith("say.stop"));
  const words = told ? t(told.key, told.values) : Watch.reasonWords(view.film.run, plan.stop[0]);
  return t("queue.stop", {words: words[0].toUpperCase() + words.slice(1)});
}

// -- a titled list of requests, whose rows are kept and filled again

function makeList() {
  const [title, rows, more] = [h("h3"), h("ol"), h("p", {class: "quiet"})];
  return {root: h("div", {class: "queue-list"}, title, rows, more), title, rows, more};
}

function fill(list, title, items) {
  Watch.say(list.title, title);
  const shown = items.slice(0, MAX_ROWS);
  while (list.rows.childElementCount > shown.length) list.rows.lastChild.remove();
  while (list.rows.childElementCount < shown.length) list.rows.append(makeRow());
  shown.forEach((item, i) => fillRow(list.rows.children[i], item));
  const rest = items.length - shown.length;
  Watch.say(list.more, rest ? t("queue.more", {n: rest}) : items.length ? "" : t("list.none"));
}

function makeRow() {
  const button = Watch.chip({
    tabindex: -1, onclick: () => Watch.set({request: button.dataset.request}),
    onpointerenter: () => Watch.set({hover: {request: button.dataset.request}}),
    onpointerleave: () => Watch.set({hover: {}}),
  });
  return h("li", {}, button);
}

function fillRow({firstChild: button}, {id, note, says}) {
  Watch.fillChip(button, id, note, says ? `${id}: ${says}` : id);
  button.setAttribute("aria-label", `${id}: ${note}`);
  button.dataset.request = id;
}

Watch.scene("queue", ["The queue and the budget", "队列与预算"], Queue);
