// The film of the engine that runs now: what `GET /events` says, as it comes. A `run` line begins
// it, and begins it anew: for whoever was too slow, and where the engine began anew.
//
// Read with `fetch`, and not by an EventSource, which can not send a key.
const {store, t, h} = Watch;
Watch.words({
  "live.button": ["Live", "实时"],
  "live.go": ["To what happens now", "回到当前"],
  "live.connecting": ["Connecting.", "正在连接。"],
  "live.lost": ["The engine cannot be watched: {why} Trying again.", "无法观看引擎：{why}正在重试。"],
  "live.off": ["This server does not show its engine: {why}.", "此服务器不显示引擎：{why}。"],
  "live.full": ["This film has {n} steps and ends here. “Live” begins another.",
    "影片已有 {n} 步，到此为止。点“实时”重新开始。"],
  "live.key": ["The server wants the key of the address that it has printed.",
    "服务器需要它打印的地址里的密钥。"],
  "live.wrong_key": ["This key is wrong.", "密钥不正确。"],
  "live.gone": ["it does not answer.", "没有应答。"],
});
const MAX_STEPS = 2000; // of a film, which a browser has to keep
const DRAW_MS = 100; // at the least, between two looks
const AGAIN_MS = 1000;
const HIDDEN_MS = 30_000; // nobody looks at a tab that is hidden for so long

// -- asking the server

// For this tab only: that of the address which the server prints.
const printed = new URLSearchParams(location.hash.slice(1)).get("key");
let key = printed ?? sessionStorage.getItem("key") ?? "";
Watch.setKey = (given) => {
  key = given;
  sessionStorage.setItem("key", key);
  wake();
};

// The answer, if it is one. Throws what the server says.
Watch.ask = async (path, options = {}) => {
  const headers = {...options.headers, ...(key && {Authorization: `Bearer ${key}`})};
  const answer = await fetch(path, {cache: "no-store", ...options, headers});
  if (answer.ok) return answer;
  const {status} = answer;
  const said = await answer.json().catch(() => ({}));
  throw Object.assign(new Error(said.error?.message ?? `${status}.`), {status});
};

// What a stream of server-sent events has in its `data:` lines, as it comes.
Watch.dataOf = async function* (answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const {value, done} = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    yield lines.filter((line) => line.startsWith("data: ")).map((line) => line.slice(6));
  }
};

// -- the film

let stream = null; // an AbortController, while events come
let isFull = false;
let coming = []; // lines that are not shown yet
let timer = null;
let wake = () => {};

const film = (Watch.liveFilm = () => (store.films[0]?.isLive ? store.films[0] : null));
const isAtEnd = () => store.step >= Watch.numSteps() - 1;

function toEnd() {
  Watch.play(false);
  Watch.set({step: Watch.numSteps() - 1});
}

function take(line) {
  if (line.kind === "run") {
    coming = [];
    Watch.files.tell(null);
    const begun = new Watch.Film([line]);
    begun.isLive = true;
    Watch.show([begun], [["", ""]], {step: -1});
  } else coming.push(line);
  timer ??= setTimeout(show, DRAW_MS);
}

function show() {
  timer = null;
  if (film() === null) return;
  const lines = coming;
  coming = [];
  if (lines.length) Watch.goOn(lines);
  if (film().numSteps < MAX_STEPS) return;
  isFull = !isAtEnd(); // else the next one begins at once
  stream?.abort();
}

async function read() {
  stream = new AbortController();
  try {
    const answer = await Watch.ask("/events", {signal: stream.signal});
    for await (const lines of Watch.dataOf(answer)) {
      for (const line of lines) take(Watch.parseLine(line));
    }
  } finally {
    stream = null;
    Watch.redraw();
  }
}

const pause = (ms) => new Promise((done) => {
  wake = done;
  if (ms !== null) setTimeout(done, ms);
});

// For ever: one stream after the other.
Watch.live = async () => {
  Watch.files.tell(() => t("live.connecting"));
  for (;;) {
    let wait = AGAIN_MS;
    const tried = key;
    try {
      await read();
    } catch (error) {
      if (error.name === "AbortError") {
        wait = isFull || document.hidden ? null : 0;
        if (isFull) Watch.files.tell(() => t("live.full", {n: Watch.numSteps()}));
      } else if (error.status === 401) {
        wait = key === tried ? null : 0; // else another one has been given in the meantime
        Watch.files.tell(() => t(tried ? "live.wrong_key" : "live.key"));
        Watch.playground.askForKey(tried !== "");
      } else {
        const isOff = error.status === 403;
        const why = error instanceof TypeError ? () => t("live.gone") : () => error.message;
        Watch.files.tell(() => t(isOff ? "live.off" : "live.lost", {why: why()}));
        if (isOff) wait = null;
      }
    }
    await pause(wait);
    isFull = false;
  }
};

let hidden = null;
document.addEventListener("visibilitychange", () => {
  clearTimeout(hidden);
  if (document.hidden) hidden = setTimeout(() => stream?.abort(), HIDDEN_MS);
  else if (stream === null && !isFull) wake();
});

// -- the button

const button = h("button", {class: "live", says: "live.button", onclick: () => {
  wake();
  toEnd();
}});
Watch.liveButton = button;
Watch.onDraw(() => {
  button.title = t("live.go");
  button.setAttribute("aria-pressed", String(stream !== null && isAtEnd() && !store.playing));
});
