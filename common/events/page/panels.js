// Which panels are open, and where they stand. A film says which ones its chapter is about; they
// come first, and the others wait for a button. A cache that no run has gets no panel.
const {store} = Watch;
Watch.words({"panels.all": ["All panels", "全部面板"], "panels.few": ["Fewer panels", "只看重点"]});
const BELOW = ["pool", "cache", "queue"]; // in one row, which they share
const COLUMNS = 6; // of the grid: can be shared by one, two and three
const [ROW, REST, MAX_HEIGHT] = [34, 96, 300]; // px of two runs' grid: a row, around, in all

// The film's own choice is gone when other runs are shown.
const ofFilm = Watch.settings.film?.scenes ?? [];
const isChosen = () => Watch.isOwnFilm() && !store.hasAllPanels && ofFilm.length > 0;
Watch.hasMorePanels = ofFilm.length > 0;

function openPanels() {
  const hasCache = store.films.some(({run}) => run.prefix_cache !== null);
  const names = Watch.scenes.map(({name}) => name).filter((name) => hasCache || name !== "cache");
  return isChosen() ? ofFilm.filter((name) => names.includes(name)) : names;
}

const times = (name, n) => Array(n).fill(name);

// ["grid grid grid grid words words", ...], and how high each row is.
function rowsOf(names) {
  const below = names.filter((name) => BELOW.includes(name));
  const rows = [[names.includes("words")
    ? [...times("grid", 4), ...times("words", 2)] : times("grid", COLUMNS), "minmax(0, 1.1fr)"]];
  const row = below.flatMap((name) => times(name, COLUMNS / below.length));
  if (row.length) rows.push([row, "minmax(0, 1fr)"]);
  if (names.includes("clock")) rows.push([times("clock", COLUMNS), "136px"]);
  return rows;
}

Watch.arrangePanels = (main) => {
  const names = openPanels();
  const rows = rowsOf(names);
  main.style.setProperty("--areas", rows.map(([row]) => `"${row.join(" ")}"`).join(" "));
  main.style.setProperty("--rows", rows.map(([, height]) => height).join(" "));
  const height = Math.min(MAX_HEIGHT, REST + ROW * Watch.requestIds().length);
  main.style.setProperty("--grid-height", `${height}px`);
  const first = Watch.panelOfAnswer(names); // in a narrow window: else it may be out of sight
  for (const panel of main.children) {
    const place = names.indexOf(panel.dataset.scene);
    panel.hidden = place < 0;
    panel.style.order = panel.dataset.scene === first ? -1 : place;
  }
};
