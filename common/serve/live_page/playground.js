"use strict";
// Left of the film: prompts of one's own, sent as any client sends them, and what comes back.
//
// All prompts are one HTTP request: a browser opens six connections to a server, for all tabs.
(() => {
  const {store, t, h} = Watch;
  const NUMBERS = { // name -> what it is at first
    max_tokens: "48", temperature: "0", top_p: "", top_k: "", min_p: "", seed: "",
  };
  const BETWEEN = "\n---\n";
  const KEPT = "playground"; // what is written here, for this tab and for what it is after a reload

  const title = h("h2");
  const keyName = h("span");
  const key = h("input", {type: "password", autocomplete: "off"});
  const useKey = h("button", {type: "submit"});
  const keyForm = h("form", {class: "key-form", hidden: true, onsubmit: (event) => {
    event.preventDefault();
    keyForm.hidden = true;
    Watch.setKey(key.value.trim());
    readModels();
  }}, h("label", {}, keyName, key), useKey);

  const examples = Object.keys(Watch.examples).map((name) => h("button", {"data-example": name,
    type: "button", onclick: () => write(Watch.examples[name])}));
  const prompt = h("textarea", {name: "prompts", rows: 7, spellcheck: "false",
    oninput: () => Watch.redraw()});
  const count = h("p", {class: "quiet"});
  const model = h("select");
  const modelName = h("span");
  const fields = Object.entries(NUMBERS).map(([name, value]) =>
    h("label", {}, h("span", {}, name), h("input", {name, value, inputmode: "decimal"})));
  const stopText = h("input", {name: "stop"});
  const schemaName = h("summary");
  const schema = h("textarea", {name: "schema", rows: 5, spellcheck: "false", class: "schema",
    placeholder: '{"type": "object", "properties": {"name": {"type": "string"}}}'});
  const run = h("button", {class: "run", type: "submit"});
  const stop = h("button", {type: "button", onclick: () => sent?.abort()});
  const problem = h("p", {class: "problem", role: "alert", hidden: true});
  const little = h("input", {type: "checkbox", name: "little", onchange: () => {
    Watch.useLittle(little.checked);
  }});
  const littleName = h("span");
  const form = h("form", {class: "prompts", oninput: keep, onsubmit: (event) => {
    event.preventDefault();
    send();
  }, onkeydown: (event) => {
    const isSend = event.key === "Enter" && (event.ctrlKey || event.metaKey);
    if (isSend && !run.disabled) send();
    if (isSend) event.preventDefault();
  }},
  h("p", {class: "examples"}, ...examples), prompt, count,
  h("label", {class: "model"}, modelName, model),
  h("div", {class: "fields"}, ...fields, h("label", {class: "wide"}, h("span", {}, "stop"), stopText)),
  h("details", {}, schemaName, schema),
  h("label", {class: "little", hidden: !Watch.settings.num_little}, little, littleName), h("p", {class: "go"}, run, stop), problem);
  const answers = h("ol", {class: "answers"});
  const root = h("aside", {class: "playground"}, title, keyForm, form, answers);

  let sent = null; // an AbortController, while an answer comes
  let cards = [];

  const promptsIn = (text) => text.split(/^---$\n?/m).map((one) => one.replace(/\n$/, ""))
    .filter((one) => one !== "");

  function write(prompts) {
    prompt.value = prompts.join(BETWEEN);
    keep();
    Watch.redraw();
  }

  const kept = () => [...form.elements].filter(({name}) => name && name !== "little");
  function keep() {
    const said = Object.fromEntries(kept().map(({name, value}) => [name, value]));
    sessionStorage.setItem(KEPT, JSON.stringify(said));
  }

  function restore() {
    const said = JSON.parse(sessionStorage.getItem(KEPT) ?? "null");
    if (said === null) write(Watch.examples.one);
    else for (const field of kept()) field.value = said[field.name] ?? field.value;
    little.checked = Watch.isLittle();
  }

  const tell = (words) => {
    problem.hidden = words === null;
    Watch.say(problem, words ?? "");
  };

  async function readModels() {
    try {
      const {data} = await (await Watch.ask("/v1/models")).json();
      model.replaceChildren(...data.map(({id}) => h("option", {value: id}, id)));
    } catch (error) {
      if (error.status !== 401) tell(error.message); // the film's stream asks for the key
    }
  }

  function askForKey() {
    keyForm.hidden = false;
    key.focus();
  }

  // -- sending

  // Throws a `SyntaxError` for a schema that is none, and a `RangeError` for a number that is none.
  function bodyOf(prompts) {
    const body = {model: model.value, prompt: prompts, stream: true};
    for (const input of form.querySelectorAll(".fields input")) {
      const given = input.value.trim();
      if (given === "" || !(input.name in NUMBERS)) continue;
      body[input.name] = Number(given); // NaN would be sent as null: as if nothing had been given
      if (!Number.isFinite(body[input.name])) {
        throw new RangeError(t("play.no_number", {name: input.name, given}));
      }
    }
    if (stopText.value) body.stop = stopText.value.replaceAll("\\n", "\n");
    if (schema.value.trim()) {
      const wanted = {name: "answer", schema: JSON.parse(schema.value)};
      body.response_format = {type: "json_schema", json_schema: wanted};
    }
    return body;
  }

  async function send() {
    if (sent !== null) return;
    const prompts = promptsIn(prompt.value);
    tell(null);
    let body;
    try {
      body = JSON.stringify(bodyOf(prompts));
    } catch (error) {
      const isNumber = error instanceof RangeError;
      tell(isNumber ? error.message : t("play.no_json", {why: error.message}));
      return;
    }
    sent = new AbortController();
    cards = prompts.map((text) => new Card(text));
    answers.replaceChildren(...cards.map(({root: card}) => card));
    Watch.redraw();
    try {
      const headers = {"Content-Type": "application/json"};
      const {signal} = sent;
      const answer = await Watch.ask(`${Watch.engine()}/v1/completions`, {method: "POST", body, headers, signal});
      for await (const lines of Watch.dataOf(answer)) lines.forEach(take);
    } catch (error) {
      if (error.status === 401) askForKey();
      if (error.name !== "AbortError") tell(error.message);
    }
    for (const card of cards) card.reason ??= "stopped";
    sent = null;
    Watch.redraw();
  }

  function take(line) {
    if (line === "[DONE]") return;
    const {error, choices} = JSON.parse(line);
    if (error) tell(error.message);
    for (const {index, text, finish_reason: reason} of choices ?? []) {
      cards[index].text.append(text);
      cards[index].reason = reason;
    }
    Watch.redraw();
  }

  // -- an answer, and what the film says of its request

  class Card {
    constructor(words) {
      this.words = words;
      this.reason = null;
      this.run = liveFilm()?.run; // in this film
      this.sentAfter = (liveFilm()?.now.numLives ?? 0) - 1; // the last request that was there before
      this.id = null; // of its request, in the film
      this.name = h("button", {type: "button", class: "chip",
        onclick: () => Watch.set({request: store.request === this.id ? null : this.id})},
      h("i"), h("b"), h("span", {class: "quiet"}));
      this.text = h("span", {class: "text"});
      const last = h("span", {class: "quiet"}, words.split("\n").at(-1)); // the rest stands above
      this.root = h("li", {}, this.name, h("pre", {}, h("span", {}, last, this.text)));
    }

    // The film's names are the engine's. Its request is the first that has come since, and has its text.
    find(state) {
      if (this.id !== null && state.requests.has(this.id)) return state.requests.get(this.id);
      const taken = new Set(cards.map(({id}) => id));
      for (const request of state.requests.values()) {
        const isNew = request.life > this.sentAfter || liveFilm().run !== this.run;
        if (!taken.has(request.id) && isNew && request.promptPieces.join("").endsWith(this.words)) {
          this.id = request.id;
          return request;
        }
      }
      return null;
    }

    draw(state) {
      const request = state && this.find(state);
      const [swatch, name, note] = this.name.children;
      this.name.disabled = !request;
      swatch.style.background = request ? Watch.colour(request.id) : "";
      Watch.say(name, request ? Watch.label(request.id) : "");
      Watch.say(note, this.note(state, request));
      this.name.title = request ? t("play.show", {request: request.id}) : "";
      this.name.setAttribute("aria-pressed", String(Boolean(request) && store.request === request.id));
    }

    note(state, request) {
      const said = [];
      if (this.reason !== null) {
        said.push(this.reason === "stopped" ? t("play.stopped") : t("play.ended", {reason: this.reason}));
      }
      if (!request) return said[0] ?? t("play.sent");
      const {table, numCachedTokens, numPreemptions: n} = request;
      if (this.reason === null && state.waiting.includes(request.id)) {
        const why = state.reasonToWait(request.id);
        said.push(why === null ? t("play.sent")
          : t("play.waits", {why: Watch.reasonWords(liveFilm().run, why)}));
      }
      const shared = table.filter((block) => state.usersOf(block).length > 1).length;
      if (table.length) said.push(t("play.blocks", {n: table.length}));
      if (shared) said.push(t("play.shared", {n: shared}));
      if (numCachedTokens) said.push(t("play.cached", {n: numCachedTokens}));
      if (n) said.push(t(n === 1 ? "play.preempted.one" : "play.preempted", {n}));
      return said.join(" · ");
    }
  }

  const liveFilm = () => (store.films[0]?.isLive ? store.films[0] : null);

  function draw() {
    Watch.say(title, t("play.title"));
    Watch.say(keyName, t("play.key"));
    Watch.say(useKey, t("play.use"));
    for (const button of examples) Watch.say(button, t(`play.${button.dataset.example}`));
    const n = promptsIn(prompt.value).length;
    Watch.say(count, t(n === 1 ? "play.count.one" : "play.count", {n}));
    prompt.setAttribute("aria-label", t("play.prompt"));
    schema.setAttribute("aria-label", t("play.schema"));
    answers.setAttribute("aria-label", t("play.answers"));
    Watch.say(modelName, t("play.model"));
    Watch.say(schemaName, t("play.schema"));
    Watch.say(littleName, t("play.little", {n: Watch.settings.num_little}));
    Watch.say(run, t("play.run"));
    run.title = "Ctrl+Enter";
    Watch.say(stop, t("play.stop"));
    run.disabled = sent !== null || n === 0;
    stop.disabled = sent === null;
    const state = liveFilm()?.now ?? null;
    for (const card of cards) card.draw(state);
  }

  restore();
  Watch.onDraw(draw);
  Watch.playground = {root, askForKey, readModels};
})();
