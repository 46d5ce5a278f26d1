// Tokens as text that a reader can tell apart: blanks, tabs and line breaks are shown.
const SIGNS = {" ": "·", "\n": "↵", "\t": "→", "\r": "↵"};

// Frames name draft tokens, and what the cache holds, by their ids alone. A piece of the same id
// that stands anywhere in the film says how it reads.
const dictionary = Watch.ofFilm((film) => {
  const known = new Map(); // token id -> what it adds to a text
  const note = (ids, pieces = []) => ids.forEach((id, i) => {
    if (pieces[i] && !known.has(id)) known.set(id, pieces[i]);
  });
  for (const {changes: {requests = {}, outputs = {}, pieces = {}}} of film.lines) {
    for (const row of Object.values(requests)) {
      if (Array.isArray(row)) note(row[0].prompt, row[0].prompt_pieces);
    }
    // A new list, or what it got at its end.
    for (const [id, change] of Object.entries(outputs)) {
      if (change) note(change.at(-1), pieces[id]?.at(-1));
    }
  }
  return known;
});

// A piece of text with its blanks made visible. A token may add none (half a character does).
Watch.visible = (piece) => piece.replace(/[ \n\t\r]/g, (blank) => SIGNS[blank]);

Watch.pieceOf = (film, token) => {
  const piece = dictionary(film).get(token);
  return piece === undefined ? `#${token}` : Watch.visible(piece);
};

// The piece at a position of a request, prompt and outputs counted as one.
Watch.pieceAt = (film, request, position) => {
  const numPrompt = request.prompt.length;
  const isPrompt = position < numPrompt;
  const piece = isPrompt ? request.prompt_pieces[position] : request.pieces[position - numPrompt];
  if (piece !== undefined && piece !== "") return Watch.visible(piece);
  const token = isPrompt ? request.prompt[position] : request.outputs[position - numPrompt];
  return token === undefined ? "" : Watch.pieceOf(film, token);
};

// The tokens of blocks, a chip for each: [{text, isWritten}].
Watch.tokenLine = (tokens) => Watch.h("p", {class: "pool-tokens"}, ...tokens.map((token) =>
  Watch.h("span", {class: token.isWritten ? "token" : "token is-pending"}, token.text)));
