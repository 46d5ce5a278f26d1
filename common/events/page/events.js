"use strict";
// Lines of events, read as common/events/event_kinds.py reads them. `Watch.schema` comes from those
// dataclasses: {kind: {field: [type as Python writes it, default if it may be left out]}}.
(() => {
  Watch.words({
    "event.line": ["Line {line}: {problem}", "第 {line} 行：{problem}"],
    "event.empty": ["The file has no run line.", "文件里没有 run 行。"],
    "event.no_json": ["this is no JSON object.", "不是 JSON 对象。"],
    "event.kind": ["this reader does not know the kind “{kind}”.", "本页不认识事件类型“{kind}”。"],
    "event.version": ["the events are of version {version}; this page reads version {known}.",
      "事件格式是第 {version} 版，本页只能读第 {known} 版。"],
    "event.missing": ["an event of kind “{kind}” has no “{field}”.", "“{kind}”事件缺少字段“{field}”。"],
    "event.unknown": ["an event of kind “{kind}” has “{field}”, which this page does not know.",
      "“{kind}”事件里的字段“{field}”本页不认识。"],
    "event.type": ["an event of kind “{kind}”: “{field}” is of the wrong type.",
      "“{kind}”事件的字段“{field}”类型不对。"],
    "event.run": ["the run line is the first, and the only one.", "run 行必须是第一行，而且只能有一行。"],
  });

  const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);

  const checks = {
    Any: () => true,
    None: (value) => value === null,
    str: (value) => typeof value === "string",
    bool: (value) => typeof value === "boolean",
    int: (value) => Number.isInteger(value),
    float: (value) => typeof value === "number",
  };

  // Whether a value is of a type such as "dict[str, list[int]]" or "int | str | None".
  function fits(value, type) {
    const choices = type.split(" | ");
    if (choices.length > 1) return choices.some((one) => fits(value, one));
    if (type.startsWith("list[")) {
      const inner = type.slice(5, -1);
      return Array.isArray(value) && value.every((item) => fits(item, inner));
    }
    if (type.startsWith("dict[str, ")) {
      const inner = type.slice(10, -1);
      return isObject(value) && Object.values(value).every((item) => fits(item, inner));
    }
    return checks[type](value);
  }

  class EventError extends Error {}

  function fail(line, key, values = {}) {
    const problem = Watch.t(`event.${key}`, values);
    throw new EventError(line === null ? problem : Watch.t("event.line", {line, problem}));
  }

  function parseEvent(text, line) {
    let event = null;
    try {
      event = JSON.parse(text);
    } catch {
      fail(line, "no_json");
    }
    if (!isObject(event)) fail(line, "no_json");
    const kind = event.kind;
    if (!Object.hasOwn(Watch.schema, kind)) fail(line, "kind", {kind});
    const known = Watch.schema[kind];
    if (kind === "run" && event.version !== Watch.version) {
      fail(line, "version", {version: event.version, known: Watch.version});
    }
    for (const [field, [type, ...fallback]] of Object.entries(known)) {
      if (!Object.hasOwn(event, field)) {
        if (!fallback.length) fail(line, "missing", {kind, field});
        event[field] = structuredClone(fallback[0]);
      } else if (!fits(event[field], type)) fail(line, "type", {kind, field});
      // By request: one may be called "constructor", and must not be found where it is not.
      if (type.startsWith("dict")) Object.setPrototypeOf(event[field], null);
    }
    const isKnown = (field) => field === "kind" || Object.hasOwn(known, field);
    const unknown = Object.keys(event).find((field) => !isKnown(field));
    if (unknown !== undefined) fail(line, "unknown", {kind, field: unknown});
    return event;
  }

  // What is behind the last line break was cut by a crash, and is left out.
  Watch.parseEvents = (text) => {
    const lines = text.split("\n").slice(0, -1);
    if (!lines.length) fail(null, "empty");
    return lines.map((line, index) => {
      const event = parseEvent(line, index + 1);
      if ((event.kind === "run") !== (index === 0)) fail(index + 1, "run");
      return event;
    });
  };
  Watch.parseEvent = (text) => parseEvent(text, null); // of a film that goes on: it has no lines
  Watch.EventError = EventError;
})();
