// Left of the film: prompts of one's own, sent as any client sends them, and what comes back.
//
// All prompts are one HTTP request: a browser opens six connections to a server, for all tabs.
const {store, t, h} = Watch;
const NUMBERS = { // name -> what it is at first
  max_tokens: "64", temperature: "0", top_p: "", top_k: "", min_p: "", seed: "",
};
const BETWEEN = "\n---\n";
const KINDS = ["text", "chat", "tool"]; // how the prompts are sent
const TOOL = "get_weather";
const KEPT = "playground"; // what is written here, for this tab and for what it is after a reload

const key = h("input", {type: "password", autocomplete: "off"});
let isWrong = false; // the key that was given last
const keyName = h("span", {says: () => t(isWrong ? "live.wrong_key" : "play.key")});
const keyForm = h("form", {class: "key-form", hidden: true, onsubmit: (event) => {
  event.preventDefault();
  keyForm.hidden = true;
  Watch.setKey(key.value.trim());
  readModels();
}}, h("label", {}, keyName, key),
h("button", {type: "submit", says: "play.use"}));

const examples = Object.keys(Watch.examples).map((name) => h("button", {"data-example": name,
  type: "button", says: `play.${name}`, onclick: () => write(name)}));
const prompt = h("textarea", {name: "prompts", rows: 7, spellcheck: "false", label: "play.prompt",
  oninput: () => Watch.redraw()});
const numPrompts = () => promptsIn(prompt.value).length;
const kind = h("select", {name: "kind", onchange: () => Watch.redraw()}, ...KINDS.map((value) =>
  h("option", {value, says: `play.kind.${value}`})));
const isChat = () => kind.value !== KINDS[0];
const count = h("p", {class: "quiet", says: () => {
  const n = numPrompts();
  if (isChat()) return t("play.count.chat");
  return t(n === 1 ? "play.count.one" : "play.count", {n});
}});
const model = h("select");
const fields = Object.entries(NUMBERS).map(([name, value]) =>
  h("label", {}, h("span", {}, name), h("input", {name, value, inputmode: "decimal"})));
const stopText = h("input", {name: "stop"});
const schema = h("textarea", {name: "schema", rows: 5, spellcheck: "false", class: "schema",
  label: "play.schema",
  placeholder: '{"type": "object", "properties": {"name": {"type": "string"}}}'});
const run = h("button", {class: "run", type: "submit", says: "play.run", title: "Ctrl+Enter"});
const stop = h("button", {type: "button", says: "play.stop", onclick: () => sent?.abort()});
const problem = h("p", {class: "problem", role: "alert", hidden: true});
const form = h("form", {class: "prompts", oninput: keep, onsubmit: (event) => {
  event.preventDefault();
  send();
}, onkeydown: (event) => {
  const isSend = event.key === "Enter" && (event.ctrlKey || event.metaKey);
  if (isSend && !run.disabled) send();
  if (isSend) event.preventDefault();
}},
h("p", {class: "examples"}, ...examples), prompt, count,
h("p", {class: "pair"}, h("label", {}, h("span", {says: "play.kind"}), kind),
  h("label", {class: "model"}, h("span", {says: "play.model"}), model)),
h("div", {class: "fields"},
  ...fields, h("label", {class: "wide"}, h("span", {}, "stop"), stopText)),
h("details", {}, h("summary", {says: () => t(kind.value === "tool" ? "play.schema.tool"
  : "play.schema")}), schema),
h("p", {class: "go"}, run, stop), problem);
const answers = h("ol", {class: "answers", label: "play.answers"});
const root = h("aside", {class: "playground"},
  h("h2", {says: "play.title"}), keyForm, form, answers);

let sent = null; // an AbortController, while an answer comes
let cards = [];

const promptsIn = (text) => text.split(/^---$\n?/m).map((one) => one.replace(/\n$/, ""))
  .filter((one) => one !== "");

function write(name) {
  prompt.value = Watch.examples[name].join(BETWEEN);
  if (schema.value === Watch.toolSchema) schema.value = "";
  if (name === "tool") schema.value = Watch.toolSchema;
  kind.value = KINDS.includes(name) ? name : KINDS[0];
  keep();
  Watch.redraw();
}

const kept = () => [...form.elements].filter(({name}) => name);
function keep() {
  const said = Object.fromEntries(kept().map(({name, value}) => [name, value]));
  sessionStorage.setItem(KEPT, JSON.stringify(said));
}

function restore() {
  const said = JSON.parse(sessionStorage.getItem(KEPT) ?? "null");
  if (said === null) write("one");
  else for (const field of kept()) field.value = said[field.name] ?? field.value;
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

function askForKey(isAnother = false) {
  isWrong = isAnother;
  keyForm.hidden = false;
  key.focus();
}

// -- sending

// Throws a `SyntaxError` for a schema that is none, and a `RangeError` for a number that is none.
function bodyOf(prompts) {
  const body = {model: model.value, stream: true};
  if (isChat()) {
    body.messages = prompts.map((content, i) => ({role: i % 2 ? "assistant" : "user", content}));
  } else body.prompt = prompts;
  for (const input of form.querySelectorAll(".fields input")) {
    const given = input.value.trim();
    if (given === "" || !(input.name in NUMBERS)) continue;
    body[input.name] = Number(given); // NaN would be sent as null: as if nothing had been given
    if (!Number.isFinite(body[input.name])) {
      throw new RangeError(t("play.no_number", {name: input.name, given}));
    }
  }
  if (stopText.value) body.stop = stopText.value.replaceAll("\\n", "\n");
  const wanted = schema.value.trim() ? JSON.parse(schema.value) : null;
  if (kind.value === "tool") {
    const parameters = wanted ?? {type: "object"};
    body.tools = [{type: "function", function: {name: TOOL, parameters}}];
    body.tool_choice = "required";
  } else if (wanted) {
    body.response_format = {type: "json_schema", json_schema: {name: "answer", schema: wanted}};
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
  cards = (isChat() ? prompts.slice(-1) : prompts).map((text) => new Card(text, isChat()));
  answers.replaceChildren(...cards.map(({root: card}) => card));
  Watch.redraw();
  try {
    const headers = {"Content-Type": "application/json"};
    const {signal} = sent;
    const options = {method: "POST", body, headers, signal};
    const route = isChat() ? "chat/completions" : "completions";
    const answer = await Watch.ask(`/v1/${route}`, options);
    for await (const lines of Watch.dataOf(answer)) lines.forEach(take);
  } catch (error) {
    if (error.status === 401) askForKey(true);
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
  for (const {index, text, delta, finish_reason: reason} of choices ?? []) {
    cards[index].text.append(text ?? chatText(delta));
    cards[index].reason = reason;
  }
  Watch.redraw();
}

// A thought, the content, and a call as `name {"argument": ...}`.
const chatText = ({reasoning_content: thought, content, tool_calls: calls}) => [
  thought, content,
  ...(calls ?? []).flatMap(({function: {name, arguments: given}}) => [name && `${name} `, given]),
].filter(Boolean).join("");

// -- an answer, and what the film says of its request

class Card {
  constructor(words, isInChat) {
    this.words = words;
    this.isInChat = isInChat; // then a template writes something after the words
    this.reason = null;
    this.run = Watch.liveFilm()?.run; // in this film
    this.sentAfter = Watch.liveFilm()?.lastNumber ?? -1; // the last request that was there before
    this.id = null; // of its request, in the film
    this.name = Watch.chip({type: "button", onclick: () => Watch.toggle(this.id)});
    this.text = h("span", {class: "text"});
    const end = words.split("\n").at(-1) + (isInChat ? "\n" : ""); // the rest stands above
    const last = h("span", {class: "quiet"}, end);
    this.root = h("li", {}, this.name, h("pre", {}, h("span", {}, last, this.text)));
  }

  // The film's names are the engine's. Its request is the first that has come since, and has its
  // text.
  find(film) {
    const of = (id) => film.requestIn(film.now, id, Infinity);
    if (this.id !== null && film.byId.has(this.id)) return of(this.id);
    const taken = new Set(cards.map(({id}) => id));
    const isOf = (text) => (this.isInChat ? text.includes(this.words) : text.endsWith(this.words));
    const found = film.requests.map(({id}) => of(id)).find((request) => !taken.has(request.id)
      && (request.number > this.sentAfter || film.run !== this.run)
      && isOf(request.prompt_pieces.join("")));
    this.id = found?.id ?? this.id;
    return found;
  }

  draw(film) {
    const request = film && this.find(film);
    const title = request ? t("play.show", {request: request.id}) : "";
    this.name.disabled = !request;
    Watch.fillChip(this.name, request?.id ?? null, this.note(film, request), title);
  }

  note(film, request) {
    const {reason} = this;
    const end = reason === "stopped" ? t("play.stopped") : reason && t("play.ended", {reason});
    if (!request) return end ?? t("play.sent");
    const {num_cached: numCached, num_preemptions: n} = request;
    const isWaiting = reason === null && film.now.waiting.includes(request.id);
    const why = film.waitsNow().get(request.id);
    const wait = why ? t("cell.waits", {reason: Watch.reasonWords(film.run, why)}) : t("play.sent");
    const table = request.tables[0] ?? [];
    const isShared = (block) => Watch.frames.usersOf(film.now, block).length > 1;
    const shared = table.filter(isShared).length;
    return Watch.joined(end, isWaiting && wait,
      table.length && t("play.blocks", {n: table.length}), shared && t("play.shared", {n: shared}),
      numCached && t("play.cached", {n: numCached}),
      n && t(n === 1 ? "play.preempted.one" : "play.preempted", {n}));
  }
}

function draw() {
  run.disabled = sent !== null || numPrompts() === 0;
  stop.disabled = sent === null;
  for (const card of cards) card.draw(Watch.liveFilm());
}

restore();
Watch.onDraw(draw);
Watch.playground = {root, askForKey, readModels};
