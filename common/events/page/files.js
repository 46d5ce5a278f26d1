// Runs from outside: one or two files, dropped on the page or chosen with a button.
const {t, h} = Watch;
Watch.words({
  "files.open": ["Open a run", "打开运行记录"],
  "files.drop": ["Drop one or two runs (.jsonl)", "拖入一个或两个运行记录（.jsonl）"],
  "files.bad": ["{name} cannot be shown. {why} {wanted}", "无法显示 {name}。{why}{wanted}"],
  "files.wanted": [
    "It should be a record of a run, as LLM(events=\"run.jsonl\") and python -m common.demo --events run.jsonl write it.",
    "这里需要的是运行记录，由 LLM(events=\"run.jsonl\") 或 python -m common.demo --events run.jsonl 写出。"],
  "files.many": ["These are {n} files. The page shows one run, or two side by side.",
    "拖入了 {n} 个文件。本页只显示一个运行记录，或并排显示两个。"],
  "files.empty": ["No run is here yet. Open a file that LLM(events=...) wrote.",
    "还没有运行记录。请打开 LLM(events=...) 写出的文件。"],
  "files.wrong": ["{label} ends in step {step}, where its record contradicts itself: {message}.",
    "{label} 到第 {step} 步为止，因为那里的记录自相矛盾：{message}。"],
  "files.cut": ["{label} is not whole: it ends behind step {step}, and {who} had not ended.",
    "{label} 不完整：记录到第 {step} 步之后就断了，{who} 还没有结束。"],
  "files.cut_in": ["{label} is not whole: it ends in the middle of step {step}.",
    "{label} 不完整：记录断在第 {step} 步当中。"],
});

const words = h("span");
const close = h("button", {says: "close", onclick: () => tell(null)});
const notice = h("p", {class: "notice", role: "alert", hidden: true}, words, " ", close);
const curtain = h("div", {class: "curtain", hidden: true, says: "files.drop"});
const choose = h("input", {type: "file", multiple: true, accept: ".jsonl,.ndjson", hidden: true,
  onchange: () => openFiles([...choose.files]).then(() => (choose.value = ""))});
const button = h("button", {says: "files.open", onclick: () => choose.click()});
let told = null; // a function that says it, so that it can be said in the other language, too

function tell(say) {
  told = say;
  Watch.redraw();
}

async function openFiles(files) {
  if (files.length === 0) return;
  if (files.length > 2) return tell(() => t("files.many", {n: files.length}));
  const films = [];
  for (const file of files) {
    try {
      films.push(new Watch.Film(Watch.parseLines(await file.text())));
    } catch (error) {
      return tell(() => t("files.bad",
        {name: file.name, why: error.message, wanted: t("files.wanted")}));
    }
  }
  tell(null);
  const labels = files.map(({name}) => [name.replace(/\.(jsonl|ndjson)$/, ""), ""]);
  Watch.show(films, labels, {step: 0, request: null, block: null});
}

function draw() {
  const said = told ? told() : aboutFilms(Watch.store.films);
  notice.hidden = !said;
  Watch.say(words, said);
  close.hidden = told === null;
}

function aboutFilms(films) {
  if (!films.length) return t("files.empty");
  const broken = films.find((film) => film.contradiction);
  if (broken) return t("files.wrong", {label: labelOf(broken), ...broken.contradiction});
  const cut = films.find((film) => !film.isLive && isCut(film));
  return cut ? cutWords(cut) : "";
}

const labelOf = (film) => Watch.filmLabel(Watch.store.films.indexOf(film));

// A run whose engine was stopped, or whose file was.
const openIds = (film) => film.requests.filter(({lives}) => lives.at(-1).end === null)
  .map(({id}) => id);
const isCut = (film) => film.isCut || openIds(film).length > 0;
function cutWords(film) {
  const label = labelOf(film);
  if (film.isCut) return t("files.cut_in", {label, step: film.numSteps});
  const who = openIds(film).map(Watch.name).join(", ");
  return t("files.cut", {label, step: film.numSteps - 1, who});
}

// A drag passes over many elements: it has left when it left them all.
let depth = 0;
const hasFiles = (event) => event.dataTransfer?.types.includes("Files") ?? false;
const veil = (change) => {
  depth = Math.max(0, depth + change);
  curtain.hidden = depth === 0;
};
addEventListener("dragenter", (event) => hasFiles(event) && veil(1));
addEventListener("dragleave", (event) => hasFiles(event) && veil(-1));
addEventListener("dragover", (event) => hasFiles(event) && event.preventDefault());
addEventListener("drop", (event) => {
  if (!hasFiles(event)) return;
  event.preventDefault();
  veil(-depth);
  openFiles([...event.dataTransfer.files]);
});

Watch.files = {notice, curtain, button, choose, draw, tell};
