// What the page shows now, in one place. Whoever changes it calls `Watch.set`, and whoever draws
// it registers with `Watch.onDraw` or as a scene; drawing happens once per animation frame.
//
// The part that a link should keep stands in the address: #step=37&request=b&block=5&lang=zh
const READERS = navigator.language.startsWith("zh") ? "zh" : "en"; // until a link says another
const store = (Watch.store = {
  films: [], labels: [], step: -1, request: null, block: null, hover: {}, language: READERS,
  playing: false, speed: 4, byTime: false,
});
const drawers = [];
let isAsked = false;

Watch.onDraw = (draw) => drawers.push(draw);

Watch.redraw = () => {
  if (isAsked) return;
  isAsked = true;
  requestAnimationFrame(() => {
    isAsked = false;
    for (const draw of drawers) draw();
  });
};

// What `make` finds of a film, or of all that are shown, kept as long as they are.
Watch.ofFilm = (make) => {
  const known = new WeakMap();
  return (film) => known.get(film) ?? known.set(film, make(film)).get(film);
};

// What `make` finds of the step that a view shows, kept until it shows another: panels share it.
Watch.ofStep = (make) => {
  const last = new WeakMap(); // film -> {told, found}
  return (view) => {
    const told = `${view.step} ${store.language}`;
    if (last.get(view.film)?.told !== told) last.set(view.film, {told, found: make(view)});
    return last.get(view.film).found;
  };
};

// Of all films, in the order of arrival; those of the first film come first.
Watch.requestIds = () => [...new Set(store.films.flatMap((film) => [...film.byId.keys()]))];

// The time axis is that of the longer film.
Watch.numSteps = () => Math.max(0, ...store.films.map((film) => film.numSteps));

Watch.set = (changes) => {
  Object.assign(store, changes);
  const last = Watch.numSteps() - 1;
  store.step = Math.min(Math.max(Math.round(store.step) || 0, Math.min(0, last)), last);
  if (!store.films.some((film) => film.byId.has(store.request))) store.request = null;
  if (!["en", "zh"].includes(store.language)) store.language = READERS;
  Watch.redraw();
  if (!("hover" in changes && Object.keys(changes).length === 1)) writeHashSoon();
};

// Chooses a request, or none if it is chosen.
Watch.toggle = (request) => Watch.set({request: store.request === request ? null : request});

// -- the address

const WRITE_MS = 400; // at the least, between two: Safari refuses more than 100 in 30 s
let [wroteAt, timer] = [-Infinity, null];

function writeHashSoon() {
  clearTimeout(timer);
  const wait = wroteAt + WRITE_MS - performance.now();
  if (wait > 0) timer = setTimeout(writeHash, wait);
  else writeHash();
}

function writeHash() {
  if (!store.films.length || Watch.settings.is_live) return; // its steps are gone tomorrow
  const {step, request, block, byTime, language} = store;
  const columns = byTime ? "time" : null;
  const lang = language === READERS ? null : language;
  const said = Object.entries({step, request, block, columns, lang})
    .filter(([, value]) => value !== null)
    .map(([name, value]) => `${name}=${encodeURIComponent(value)}`);
  const hash = `#${said.join("&")}`;
  if (hash === location.hash) return;
  wroteAt = performance.now();
  try {
    history.replaceState(null, "", hash);
  } catch {
    // A browser may refuse. Then the address is old, and the page goes on.
  }
}

// What an address says, as changes of the store. What it does not say is left alone.
Watch.readHash = (hash) => {
  const said = new URLSearchParams(hash.replace(/^#/, ""));
  const changes = {};
  if (/^\d+$/.test(said.get("step") ?? "")) changes.step = Number(said.get("step"));
  if (said.has("request")) changes.request = said.get("request");
  if (/^\d+$/.test(said.get("block") ?? "")) changes.block = Number(said.get("block"));
  if (said.has("columns")) changes.byTime = said.get("columns") === "time";
  if (said.has("lang")) changes.language = said.get("lang");
  return changes;
};

// Not `location.hash`: what was still to be written may stand there by now.
addEventListener("hashchange", ({newURL}) => {
  const {hash} = new URL(newURL);
  const begin = {request: null, block: null, byTime: false, language: READERS};
  Watch.set({...begin, ...Watch.readHash(hash)});
});

// -- scenes

Watch.scenes = [];
Watch.scene = (name, title, Scene) => Watch.scenes.push({name, title, Scene});

// One film as a scene sees it. In compare mode a shorter film stays at its last step.
Watch.View = class {
  constructor(film, index) {
    Object.assign(this, {film, index});
  }
  get step() {
    return Math.min(store.step, this.film.numSteps - 1);
  }
  // At the end of a film that goes on: what is there now.
  get isNow() {
    return this.film.isLive && this.step === this.film.numSteps - 1;
  }
  get state() {
    return this.isNow ? this.film.now : this.film.stateAfter(this.step);
  }
  // Also one that has ended; undefined: it has not arrived.
  request(id) {
    return this.film.requestIn(this.state, id, this.isNow ? Infinity : this.step);
  }
  get facts() {
    return this.film.steps[this.step] ?? null; // null: a film without steps
  }
};
