"use strict";
// Tokens as text that a reader can tell apart: blanks, tabs and line breaks are shown.
(() => {
  Watch.words({
    "token.id": ["token {id}", "token {id}"],
    "token.pending": ["not written yet", "还没写入"],
  });

  const HIDDEN = -1;
  const SIGNS = {" ": "·", "\n": "↵", "\t": "→", "\r": "↵"};
  const dictionaries = new WeakMap(); // film -> Map(token id -> what it adds to a text)

  // Events name draft tokens, and what the cache holds, by their ids alone. A piece of the same id that
  // stands anywhere in the film says how it reads.
  function dictionary(film) {
    if (!dictionaries.has(film)) {
      const known = new Map();
      const note = (ids, pieces) =>
        ids.forEach((id, i) => {
          if (pieces[i] && !known.has(id)) known.set(id, pieces[i]);
        });
      for (const event of film.events) {
        if (event.kind === "arrived") note(event.prompt, event.pieces);
        for (const row of event.kind === "snapshot" ? event.requests : []) {
          note(row.prompt, row.prompt_pieces);
          note(row.outputs, row.pieces);
        }
        if (event.kind !== "computed") continue;
        for (const [id, tokens] of Object.entries(event.tokens))
          note(tokens, event.pieces[id] ?? []);
      }
      dictionaries.set(film, known);
    }
    return dictionaries.get(film);
  }

  // A piece of text with its blanks made visible. A token may add none (half a character does).
  Watch.visible = (piece) => piece.replace(/[ \n\t\r]/g, (blank) => SIGNS[blank]);

  Watch.pieceOf = (film, token) => {
    if (token === HIDDEN) return "▒"; // of a request that the viewer may not read
    const piece = dictionary(film).get(token);
    return piece === undefined ? `#${token}` : Watch.visible(piece);
  };

  // The piece at a position of a request, prompt and outputs counted as one.
  Watch.pieceAt = (film, request, position) => {
    const numPrompt = request.prompt.length;
    const isPrompt = position < numPrompt;
    const piece = isPrompt ? request.promptPieces[position] : request.pieces[position - numPrompt];
    if (piece !== undefined && piece !== "") return Watch.visible(piece);
    const token = isPrompt ? request.prompt[position] : request.outputs[position - numPrompt];
    return token === undefined ? "" : Watch.pieceOf(film, token);
  };

  // One chip a token. `look` is a class name.
  Watch.tokenChip = (text, look = "") => {
    const chip = document.createElement("span");
    chip.className = `token ${look}`;
    chip.textContent = text;
    return chip;
  };
})();
