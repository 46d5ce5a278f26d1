// Two families of colours that do not meet in one mark: what was computed has the book's colours
// (workshop/book/palette.py, as CSS variables), and a request has one of nine others, with its
// label. The nine are Paul Tol's "muted" scheme, which colour-blind readers can tell apart.
const REQUESTS = [
  "#332288", "#88ccee", "#117733", "#ddcc77", "#cc6677", "#44aa99", "#882255", "#999933",
  "#aa4499",
];

// A variable as a plain colour, for a canvas, which knows no variables.
const plain = new Map();
Watch.plain = (colour) => {
  const name = /^var\((--[\w-]+)\)$/.exec(colour)?.[1];
  if (name === undefined) return colour;
  if (!plain.has(name)) {
    plain.set(name, getComputedStyle(document.documentElement).getPropertyValue(name).trim());
  }
  return plain.get(name);
};

Watch.isDark = matchMedia("(prefers-color-scheme: dark)");
Watch.isDark.addEventListener("change", () => {
  plain.clear();
  const {films, labels, step} = Watch.store;
  Watch.show(films, labels, {step}); // every scene is made anew
});

const placeOf = (id) =>
  Watch.store.films.map((film) => film.byId.get(id)).find(Boolean)?.index ?? 0;
Watch.colour = (id) => REQUESTS[placeOf(id) % REQUESTS.length];

// Black or white, whichever can be read on a colour.
Watch.inkOn = (colour) => {
  const plainly = Watch.plain(colour);
  const [r, g, b] = [1, 3, 5].map((at) => parseInt(plainly.slice(at, at + 2), 16) / 255)
    .map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? "#000000" : "#ffffff";
};

// Names as short as they may be: without the beginning that all have ("request-12": "12").
const labelsOf = Watch.ofFilm(() => {
  const ids = Watch.requestIds();
  let shared = ids.length > 1 && ids.some((id) => id.length > 4) ? ids[0].length : 0;
  for (const id of ids) while (!id.startsWith(ids[0].slice(0, shared))) shared--;
  while (shared > 0 && /[0-9a-z]/i.test(ids[0][shared - 1])) shared--; // whole words only
  return new Map(ids.map((id) => [id, shorten(id.slice(shared) || id)]));
});
Watch.label = (id) => labelsOf(Watch.store.films).get(id) ?? id;

// In a sentence, "request-12" can be read better than "12".
Watch.name = (id) => (id.length <= 16 ? id : Watch.label(id));

const shorten = (text) => (text.length <= 8 ? text : `${text.slice(0, 3)}…${text.slice(-4)}`);
