// The last of the scripts: reads the films that stand in the page and shows them.
async function textOf(script) {
  if (script.dataset.encoding !== "gzip") return script.textContent;
  const bytes = Uint8Array.from(atob(script.textContent), (char) => char.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
}

async function start() {
  document.documentElement.classList.toggle("embedded", self !== top); // in a page of the book
  Watch.frame.make();
  Object.assign(Watch.store, Watch.readHash(location.hash)); // its language: there may be no film
  const scripts = [...document.querySelectorAll('script[type="application/x-ndjson"]')];
  const texts = await Promise.all(scripts.map(textOf));
  const said = Watch.readHash(location.hash);
  const isAsked = new URLSearchParams(location.hash.slice(1)).has("ask"); // begins with a question
  // A hash that names a language only still begins where the film begins.
  const begin = "step" in said ? said : {...Watch.readHash(Watch.settings.start), ...said};
  try {
    const films = texts.map((text) => new Watch.Film(Watch.parseLines(text)));
    const labels = scripts.map(({dataset}) => [dataset.label, dataset.labelZh]);
    for (const film of films) film.isOfPage = true;
    const num = films.length - (Watch.settings.num_turned ?? 0);
    Watch.knob.hold(films, labels, num);
    Watch.show(films.slice(0, num), labels.slice(0, num), begin);
    if (isAsked) Watch.guide.ask();
  } catch (error) {
    if (!(error instanceof Watch.LineError)) throw error;
    Watch.show([], []);
    Watch.files.tell(() => error.message);
  }
  document.documentElement.dataset.ready = "true"; // for tests: there is something to look at
}

start();
