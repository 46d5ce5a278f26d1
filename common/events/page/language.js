// Every visible string stands here or in the file that shows it, in English and in Chinese:
//
//   Watch.words({"step": ["step {n}", "第 {n} 步"]});      Watch.t("step", {n: 3})
globalThis.Watch = globalThis.Watch || {};
// What Python knows and the page needs: the version of records, the reasons to wait, a title.
Watch.settings = JSON.parse(document.getElementById("settings").textContent);

const table = new Map();
const languages = ["en", "zh"];

Watch.words = (words) => {
  for (const [key, both] of Object.entries(words)) {
    if (table.has(key)) throw new Error(`the words of "${key}" are said twice`);
    table.set(key, both);
  }
};

// Of a text in both languages, that of the reader.
Watch.inLanguage = (both) => both[Math.max(0, languages.indexOf(Watch.store?.language ?? "en"))];

// English has such nouns in the plural, behind their number; of one it says "1 token".
const NOUN = "(?:(?:computed|prompt|cached|more|draft) )*"
  + "(?:token|output|block|node|request|reference)";
const SEVERAL = new RegExp(`\\{(\\w+)\\} (${NOUN})s\\b`, "g");

// A key without words shows as itself: a gap that is seen, and a page that goes on.
Watch.t = (key, values = {}) => {
  const both = table.get(key);
  if (both === undefined) return key;
  const words = Watch.inLanguage(both).replace(SEVERAL, (several, name, noun) =>
    (values[name] === 1 ? `{${name}} ${noun}` : several));
  return words.replace(/\{(\w+)\}/g, (hole, name) =>
    (name in values ? String(values[name]) : hole));
};

Watch.wordTable = () => new Map(table); // for tests
