// The function behind a sentence, in a window of its own. `settings.sources` comes from
// workshop/watch/source_lines.py: functions with their text, null for one that is gone, and rules that
// say which one a run means.
Watch.words({
  "source.open": ["Show the function that decided this: {function}, {file}, line {line}",
    "查看决定这件事的函数：{function}，{file} 第 {line} 行"],
  "source.of": ["{file}, line {line}, in {name}", "{file}，第 {line} 行，位于 {name}"],
});

const {h} = Watch;
const {places, rules} = Watch.settings.sources ?? {places: [], rules: []};

const fits = (run, when) => Object.entries(when).every(([name, value]) =>
  (name === "setting" ? Boolean(run.config[value])
    : name === "windows" ? run.windows.length > 0 : run[name] === value));

// The function of the first rule that fits what ran; null for an unknown engine, or without one.
Watch.sourceOf = (run, sentence) => {
  const rule = rules.find((one) => one.sentence === sentence && fits(run, one.when));
  return rule === undefined ? null : places[rule.place];
};

let opened = null; // the button whose lines are shown

const title = h("h3", {id: "source-title"});
const close = h("button", {class: "source-close", says: "close", onclick: () => shut()});
const code = h("pre", {class: "source-code", tabindex: 0});
const panel = h("div",
  {class: "source", popover: "auto", role: "dialog", "aria-labelledby": "source-title"},
  h("div", {class: "source-head"}, title, close), code);

panel.addEventListener("keydown", (event) => {
  event.stopPropagation(); // the page's keys rest while it is open
  if (event.key === "Escape") shut();
});

function shut() {
  panel.hidePopover();
  opened?.focus();
}

function show(place, button) {
  if (!panel.isConnected) document.body.append(panel);
  opened = button;
  const {file, line, function: name} = place;
  title.textContent = Watch.t("source.of", {file, line, name});
  code.setAttribute("aria-label", title.textContent);
  code.replaceChildren(...place.lines.map((text, i) => lineOf(text, line + i)));
  panel.showPopover();
  putNear(button);
  code.focus();
}

function lineOf(text, number) {
  return h("span", {class: "source-line", "data-line": number},
    h("span", {class: "source-number"}, `${String(number).padStart(4)} `), `${text}\n`);
}

// Below the button, or above it where there is no room; never outside of the window.
function putNear(button) {
  const at = button.getBoundingClientRect();
  const {width, height} = panel.getBoundingClientRect();
  const top = at.bottom + 4 + height < innerHeight ? at.bottom + 4 : at.top - height - 4;
  panel.style.left = `${Math.max(8, Math.min(at.left, innerWidth - width - 8))}px`;
  panel.style.top = `${Math.max(8, Math.min(top, innerHeight - height - 8))}px`;
}

// A button that says where, and opens the lines.
Watch.sourceButton = (run, sentence) => {
  const place = Watch.sourceOf(run, sentence);
  if (place === null) return null;
  const label = Watch.t("source.open", place);
  const button = h("button", {
    class: "source-link", "data-sentence": sentence, "aria-label": label, title: label,
    "aria-haspopup": "dialog", onclick: () => show(place, button),
  }, `${place.file.split("/").at(-1)}:${place.line}`);
  return button;
};
