// The site's calculators: the requests that fit into KV memory, the least time of a decode step, the
// gain of speculation. Each <div class="calculator" data-calculator="kv"> is filled when the page is
// loaded. The arithmetic is the book's Python again: `test_calculators.py` compares the two.
"use strict";
(() => {
  const isChinese = document.documentElement.lang.startsWith("zh");
  const say = (english, chinese) => (isChinese ? chinese : english);
  const sum = (numbers) => numbers.reduce((total, number) => total + number, 0);

  // -- models: a few known ones, and config.json of the families that the engine serves

  const SIZES = ["num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size"];
  const model = (family, sizes, others) => ({architectures: [`${family}ForCausalLM`],
    ...Object.fromEntries(SIZES.map((name, i) => [name, sizes[i]])), ...others});
  // Source: huggingface.co/OWNER/NAME/blob/main/config.json of Qwen/Qwen3-0.6B, -8B, -30B-A3B,
  // meta-llama/Llama-3.1-8B, -70B, mistralai/Mistral-7B-v0.1, Mixtral-8x7B-v0.1, google/gemma-3-1b-it
  const MODELS = {
    "Qwen3-0.6B": model("Qwen3", [28, 1024, 3072, 16, 8, 128, 151936], {tie_word_embeddings: true}),
    "Qwen3-8B": model("Qwen3", [36, 4096, 12288, 32, 8, 128, 151936]),
    "Qwen3-30B-A3B": model("Qwen3Moe", [48, 2048, 6144, 32, 4, 128, 151936],
      {num_experts: 128, num_experts_per_tok: 8, moe_intermediate_size: 768}),
    "Llama 3.1 8B": model("Llama", [32, 4096, 14336, 32, 8, 128, 128256]),
    "Llama 3.1 70B": model("Llama", [80, 8192, 28672, 64, 8, 128, 128256]),
    "Mistral 7B v0.1": model("Mistral", [32, 4096, 14336, 32, 8, 128, 32000], {sliding_window: 4096}),
    "Mixtral 8x7B": model("Mixtral", [32, 4096, 14336, 32, 8, 128, 32000],
      {num_local_experts: 8, num_experts_per_tok: 2}),
    "Gemma 3 1B": model("Gemma3", [26, 1152, 6912, 4, 1, 256, 262144], {sliding_window: 512}),
  };

  // Defaults as in model_config.py; `fixed` are values of fields that the family does not read.
  const WINDOW = {sliding_window: 4096};
  const FAMILIES = {
    Qwen3ForCausalLM: {...WINDOW, max_window_layers: 28, head_dim: 128},
    Qwen2ForCausalLM: {...WINDOW, max_window_layers: 28},
    LlamaForCausalLM: {isMultiHead: true, fixed: {sliding_window: null}},
    MistralForCausalLM: {...WINDOW, num_key_value_heads: 8, fixed: {layer_types: null}},
    Gemma3ForCausalLM: {...WINDOW, sliding_window_pattern: 6, head_dim: 256,
      tie_word_embeddings: true},
    Olmo3ForCausalLM: {...WINDOW, isMultiHead: true, fixed: {sliding_window_pattern: 4}},
    Qwen3MoeForCausalLM: {...WINDOW, num_experts_per_tok: 8, moe_intermediate_size: 768,
      fixed: {max_window_layers: 0}},
    MixtralForCausalLM: {num_key_value_heads: 8, num_local_experts: 8, num_experts_per_tok: 2,
      fixed: {layer_types: null}},
  };

  // The shape of a model. Throws an Error for the reader if the book's engine would not serve it.
  function readConfig(config) {
    const architecture = String(config?.architectures);
    if (!Object.hasOwn(FAMILIES, architecture)) {
      const known = Object.keys(FAMILIES).map((name) => name.replace("ForCausalLM", "")).join(", ");
      throw new Error(say(`architectures is ${architecture}, which is not supported. Supported are `
        + `${known} (...ForCausalLM).`,
      `不支持 architectures 为 ${architecture} 的模型，只支持 ${known}（...ForCausalLM）。`));
    }
    const family = FAMILIES[architecture];
    const fields = {...family, ...config, ...family.fixed};
    const whole = (name, absent) => {
      const value = fields[name] ?? absent;
      if (Number.isInteger(value) && value > 0) return value;
      throw new Error(say(`${name} in config.json must be a whole number > 0, got ${fields[name]}.`,
        `config.json 的 ${name} 应为大于 0 的整数，实际是 ${fields[name]}。`));
    };
    const [layers, hidden, heads] = [SIZES[0], SIZES[1], SIZES[3]].map((name) => whole(name));
    const kvHeads = whole("num_key_value_heads", family.isMultiHead && heads);
    if (heads % kvHeads) {
      throw new Error(say(`num_key_value_heads in config.json must divide ${heads}, got ${kvHeads}.`,
        `config.json 的 num_key_value_heads 应整除 ${heads}，实际是 ${kvHeads}。`));
    }
    const {max_window_layers: first, sliding_window_pattern: every, layer_types: types} = fields;
    const isOff = fields.sliding_window == null || (first !== undefined && !fields.use_sliding_window);
    const isWindowed = (i) => (types ? types[i] === "sliding_attention"
      : first !== undefined ? i >= first : every === undefined || (i + 1) % every > 0);
    const all = Array.from({length: layers}, (_, i) => i);
    const isSparse = (i) => (i + 1) % (fields.decoder_sparse_step ?? 1) === 0
      && !(fields.mlp_only_layers ?? []).includes(i);
    return {
      layers, hidden, heads, kvHeads, headDim: whole("head_dim", Math.floor(hidden / heads)),
      inner: whole("intermediate_size"), vocab: whole("vocab_size"),
      isTied: Boolean(fields.tie_word_embeddings),
      windows: all.map((i) => (!isOff && isWindowed(i) ? whole("sliding_window") : null)),
      experts: family.num_experts_per_tok === undefined ? null : {
        number: whole("num_experts", fields.num_local_experts ?? 128),
        active: whole("num_experts_per_tok"),
        inner: whole("moe_intermediate_size", fields.intermediate_size),
        layers: all.filter(isSparse).length,
      },
    };
  }

  // The weights in matrices: `every` step reads these, an `expert` has these in all layers, `all`.
  function countWeights({layers, hidden, heads, kvHeads, headDim, inner, vocab, isTied, experts}) {
    const {number, inner: expertInner, layers: sparse} = experts ?? {number: 0, inner: 0, layers: 0};
    const every = layers * 2 * hidden * headDim * (heads + kvHeads) + sparse * hidden * number
      + (layers - sparse) * 3 * hidden * inner + vocab * hidden;
    const expert = sparse * 3 * hidden * expertInner;
    return {every, expert, all: every + number * expert + (isTied ? 0 : vocab * hidden)};
  }

  // -- KV memory: kv_budget.py, grouped_kv_memory.py, layer_groups.py

  // Groups of `size` layers that share a block table. A window of `longest` tokens hides nothing.
  function dealLayers(windows, longest) {
    const counts = new Map();
    for (const window of windows) {
      const kind = window !== null && window < longest ? window : null;
      counts.set(kind, (counts.get(kind) ?? 0) + 1);
    }
    const numbers = [...counts.values()];
    const unused = (size) => sum(numbers.map((n) => Math.ceil(n / size) * size - n));
    const [few, many] = [Math.min(...numbers), Math.max(...numbers)];
    const size = unused(many) < unused(few) ? many : few;
    const kinds = [...counts].sort(([a], [b]) => (a ?? 0) - (b ?? 0)); // null first
    return {size, windows: kinds.flatMap(([kind, n]) => Array(Math.ceil(n / size)).fill(kind))};
  }

  const bytesForKV = (total, share, weights, others) =>
    Math.max(0, Math.trunc(total * share) - weights - others);

  const kvBytesPerToken = ({layers, kvHeads, headDim}, size) => 2 * layers * kvHeads * headDim * size;

  // Requests of `length` tokens that fit into `bytes`, if a step computes up to `stepTokens` of one.
  function fitRequests(shape, {bytes, itemsize, blockSize, length, stepTokens}) {
    const groups = dealLayers(shape.windows, length);
    const blockBytes = 2 * groups.size * blockSize * shape.kvHeads * shape.headDim * itemsize;
    const blocks = Math.floor(bytes / blockBytes);
    const whole = Math.ceil(length / blockSize);
    const perRequest = sum(groups.windows.map((window) => (window === null ? whole
      : Math.min(whole, Math.ceil((window - 1 + stepTokens) / blockSize) + 1))));
    const requests = Math.max(0, Math.floor((blocks - 1) / perRequest)); // block 0 is the null block
    return {groups, blockBytes, blocks, perRequest, requests};
  }

  // -- the least time of a decode step: gpu_lab.py; activations have 2 bytes a number

  function decodeFloor(shape, {requests, context, weightBytes, kvBytes, bandwidth, rate}) {
    const {every, expert} = countWeights(shape);
    const {number, active} = shape.experts ?? {number: 1, active: 0};
    const share = 1 - (1 - active / number) ** requests; // of the experts, if routers choose evenly
    const width = shape.heads * shape.headDim;
    const keys = sum(shape.windows.map((window) => Math.min(context, window ?? context)));
    const weights = (every + share * number * expert) * weightBytes;
    const kv = 2 * requests * keys * shape.kvHeads * shape.headDim * kvBytes;
    const bytes = weights + kv + 2 * requests * (shape.hidden + 2 * shape.layers * width);
    const used = every + active * expert;
    const operations = 2 * requests * used + 4 * requests * keys * width;
    const [memoryMs, arithmeticMs] = [bytes / (bandwidth * 1e6), operations / (rate * 1e9)];
    return {every, all: number * expert, keys, weights, kv, bytes, used, operations, memoryMs,
      arithmeticMs, ms: Math.max(memoryMs, arithmeticMs)};
  }

  // -- speculation: acceptance.py, draft_acceptance.py

  const expectedTokens = (acceptance, drafts) => (acceptance === 1 ? drafts + 1
    : (1 - acceptance ** (drafts + 1)) / (1 - acceptance));

  const expectedSpeedup = (acceptance, drafts, draftCost, verifyCost) =>
    expectedTokens(acceptance, drafts) / (verifyCost + drafts * draftCost);

  globalThis.bookCalculators = {MODELS, readConfig, countWeights, dealLayers, bytesForKV,
    kvBytesPerToken, fitRequests, decodeFloor, expectedTokens, expectedSpeedup};

  // -- what is asked, and the answer: sentences, and lines of a name, a formula, numbers, an outcome

  const show = (number) => number.toLocaleString("en",
    Math.abs(number) >= 1000 ? {maximumFractionDigits: 0} : {maximumSignificantDigits: 4});
  const memory = (bytes) => {
    const power = [2 ** 10, 2 ** 20, 2 ** 30].filter((unit) => bytes >= unit).length;
    return `${show(bytes / 1024 ** power)} ${["B", "KiB", "MiB", "GiB"][power]}`;
  };
  const giga = (bytes) => `${show(bytes / 1e9)} GB`;

  const real = (name, label, value, min, max) => ({name, label, value, min, max});
  const count = (name, label, value, max) => ({name, label, value, min: 1, max, isWhole: true});
  const FORMATS = [[2, "bfloat16"], [1, "8 bit"], [4, "float32"]];
  const KV_IN = {name: "kvBytes", label: say("KV cache in", "KV 缓存的格式"), choices: FORMATS};
  const WEIGHTS_IN = {name: "weightBytes", label: say("Weights in", "权重的格式"),
    choices: [...FORMATS, [0.5, "4 bit"]]};

  const CALCULATORS = {};

  CALCULATORS.kv = {
    hasModel: true,
    fields: [
      real("total", say("Memory (GiB)", "内存（GiB）"), 24, 0.001, 1e6),
      real("share", say("Share used (%)", "使用比例（%）"), 90, 1, 100),
      {...WEIGHTS_IN, choices: [...WEIGHTS_IN.choices, [0, say("not in it", "不在其中")]]},
      real("others", say("Activations etc. (GiB)", "激活值等（GiB）"), 1.5, 0, 1e6),
      KV_IN,
      count("length", say("Tokens of a request", "一个请求的 token 数"), 2048, 1e8),
      count("blockSize", say("Block size (tokens)", "块大小（token）"), 16, 1e6),
      {...count("stepTokens", say("Tokens of a step", "一步的 token 数"), 2048, 1e6), ofWindows: true},
    ],
    compute(shape, {total, share, weightBytes, others, kvBytes, length, blockSize, stepTokens}) {
      const {all} = countWeights(shape);
      const weights = Math.ceil(all * weightBytes);
      const bytes = bytesForKV(total * 2 ** 30, share / 100, weights, Math.round(others * 2 ** 30));
      const {groups: {size, windows}, blockBytes, blocks, perRequest, requests} =
        fitRequests(shape, {bytes, itemsize: kvBytes, blockSize, length, stepTokens});
      const token = kvBytesPerToken(shape, kvBytes);
      const whole = `⌈${show(length)} / ${show(blockSize)}⌉`;
      const ofGroup = (window) => (window === null ? whole : `min(${whole}, `
        + `⌈(${show(window)} − 1 + ${show(stepTokens)}) / ${show(blockSize)}⌉ + 1)`);
      const times = (window) => windows.filter((other) => other === window).length;
      const ofGroups = [...new Set(windows)].map((window) => `${times(window)} × ${ofGroup(window)}`);
      const isOne = windows.length === 1;
      const numbers = `${shape.kvHeads} × ${shape.headDim} × ${kvBytes}`;
      const [left, ofRequest] = [memory(bytes), memory(perRequest * blockBytes)];
      return {
        result: requests > 0
          ? say(`${left} of KV memory hold ${show(requests)} request${requests > 1 ? "s" : ""} of `
            + `${show(length)} tokens.`,
          `${left} 的 KV 内存放得下 ${show(requests)} 个 ${show(length)} token 的请求。`)
          : say(`No request of ${show(length)} tokens fits: ${left} are left for KV.`,
            `${show(length)} token 的请求一个也放不下：留给 KV 的内存有 ${left}。`),
        detail: say(`A request takes ${ofRequest} in ${show(perRequest)} blocks.`,
          `一个请求占 ${ofRequest}，共 ${show(perRequest)} 块。`),
        lines: [
          [say("KV of a token", "一个 token 的 KV"), "2 × layers × kv_heads × head_dim × kv_bytes",
            `2 × ${shape.layers} × ${numbers}`, `${show(token)} B = ${memory(token)}`],
          [say("Weights", "权重"), "num_weights × weight_bytes", `${show(all)} × ${weightBytes}`,
            memory(weights)],
          [say("KV memory", "KV 内存"), "memory × share − weights − activations",
            `${show(total)} GiB × ${show(share)}% − ${memory(weights)} − ${show(others)} GiB`, left],
          [say("A block", "一块"), `2 × ${isOne ? "layers" : "group_layers"} × block_size × kv_heads `
            + "× head_dim × kv_bytes", `2 × ${size} × ${show(blockSize)} × ${numbers}`, memory(blockBytes)],
          [say("Blocks", "块数"), "⌊kv_memory / block⌋", `⌊${show(bytes)} / ${show(blockBytes)}⌋`,
            show(blocks)],
          [say("Blocks of a request", "一个请求的块数"), isOne ? "⌈tokens / block_size⌉"
            : "∑ groups: min(⌈tokens / block_size⌉, ⌈(window − 1 + step) / block_size⌉ + 1)",
          isOne ? whole : ofGroups.join(" + "), show(perRequest)],
          [say("Requests", "请求数"), "⌊(blocks − null_block) / request_blocks⌋",
            `⌊(${show(blocks)} − 1) / ${show(perRequest)}⌋`, show(requests)],
        ],
      };
    },
  };

  CALCULATORS.step = {
    hasModel: true,
    fields: [
      count("requests", say("Requests in the step", "一步的请求数"), 64, 1e6),
      count("context", say("Tokens of a request", "一个请求的 token 数"), 1024, 1e8),
      WEIGHTS_IN, KV_IN,
      real("bandwidth", say("Bandwidth (GB/s)", "带宽（GB/s）"), 3350, 0.001, 1e7),
      real("rate", say("Arithmetic (TFLOP/s)", "算力（TFLOP/s）"), 989, 0.001, 1e7),
      {...real("measured", say("Measured (ms)", "实测（ms）"), "", 1e-6, 1e9), isOptional: true},
    ],
    compute(shape, values) {
      const {requests, context, weightBytes, kvBytes, measured} = values;
      const {every, all, keys, weights, kv, bytes, used, operations, memoryMs, arithmeticMs, ms} =
        decodeFloor(shape, values);
      const {number, active} = shape.experts ?? {};
      const hasWindow = keys < shape.layers * context;
      const tokens = hasWindow ? "layer_tokens" : "tokens × layers";
      const seen = hasWindow ? show(keys) : `${show(context)} × ${shape.layers}`;
      const bound = memoryMs < arithmeticMs ? say("arithmetic", "算力") : say("bandwidth", "带宽");
      const [perSecond, percent] = [show(1000 * requests / ms), `${show(100 * ms / measured)}%`];
      return {
        result: say(`The step takes at least ${show(ms)} ms, bound by ${bound}.`,
          `这一步至少要 ${show(ms)} ms，受限于${bound}。`),
        detail: say(`That is at most ${perSecond} tokens a second.`, `每秒最多 ${perSecond} 个 token。`)
          + (measured && say(` The measured ${show(measured)} ms are ${percent} of the roofline.`,
            `实测的 ${show(measured)} ms 达到 roofline 的 ${percent}。`) || ""),
        lines: [
          [say("Weights", "权重"), (number ? "(others + experts × (1 − (1 − active / num_experts)"
            + "^requests))" : "read_weights") + " × weight_bytes", (number ? `(${show(every)} + `
            + `${show(all)} × (1 − (1 − ${active} / ${number})^${requests}))` : show(every))
            + ` × ${weightBytes}`, giga(weights)],
          ["KV", `2 × requests × ${tokens} × kv_heads × head_dim × kv_bytes`,
            `2 × ${show(requests)} × ${seen} × ${shape.kvHeads} × ${shape.headDim} × ${kvBytes}`,
            giga(kv)],
          [say("Bytes", "字节"), "weights + kv + activations",
            `${giga(weights)} + ${giga(kv)} + ${giga(bytes - weights - kv)}`, giga(bytes)],
          [say("Operations", "运算"), `2 × requests × token_weights + 4 × requests × ${tokens} × `
            + "heads × head_dim", `2 × ${show(requests)} × ${show(used)} + 4 × ${show(requests)} × `
            + `${seen} × ${shape.heads} × ${shape.headDim}`, `${show(operations / 1e12)} TFLOP`],
          [say("Least time", "最短时间"), "max(bytes / bandwidth, operations / arithmetic)",
            `max(${show(memoryMs)}, ${show(arithmeticMs)}) ms`, `${show(ms)} ms`],
          ...(measured ? [[say("Share", "比例"), "least_time / measured",
            `${show(ms)} / ${show(measured)}`, percent]] : []),
        ],
      };
    },
  };

  CALCULATORS.speculation = {
    fields: [
      real("a", say("Acceptance a", "接受率 a"), 0.8, 0, 1),
      {...count("k", say("Draft tokens k", "草稿 token 数 k"), 4, 1000), min: 0},
      real("v", say("Target pass v (steps)", "目标前向 v（步）"), 1.2, 0.001, 1e6),
      real("c", say("Draft pass c (steps)", "草稿前向 c（步）"), 0.1, 0, 1e6),
    ],
    compute(shape, {a, k, v, c}) {
      const [tokens, speedup] = [expectedTokens(a, k), expectedSpeedup(a, k, c, v)];
      return {
        result: say(`Speculation ${speedup < 1 ? "loses" : "pays"}: ${show(speedup)} times the speed of `
          + "plain decoding.", `${speedup < 1 ? "不划算" : "划算"}：速度是普通解码的 ${show(speedup)} 倍。`),
        detail: say(`A pass yields ${show(tokens)} tokens and costs ${show(v + k * c)} plain steps.`,
          `一次前向得到 ${show(tokens)} 个 token，代价是 ${show(v + k * c)} 个普通步。`),
        lines: [
          [say("Tokens a pass", "每次前向的 token 数"), a === 1 ? "k + 1" : "(1 − a^(k+1)) / (1 − a)",
            a === 1 ? `${k} + 1` : `(1 − ${show(a)}^${k + 1}) / (1 − ${show(a)})`, show(tokens)],
          [say("Speed-up", "加速比"), "tokens / (v + k × c)",
            `${show(tokens)} / (${show(v)} + ${k} × ${show(c)})`, show(speedup)],
        ],
      };
    },
  };

  // -- the page

  let numInputs = 0;
  const h = (tag, properties, ...children) => {
    const node = Object.assign(document.createElement(tag), properties);
    node.append(...children);
    return node;
  };
  const option = (text, value) => h("option", {value}, text);
  function fill(div) {
    const {hasModel, fields, compute} = CALCULATORS[div.dataset.calculator];
    const shapes = new Map(Object.entries(MODELS).map(([name, own]) => [name, readConfig(own)]));
    const form = h("form", {onsubmit: (event) => event.preventDefault(), oninput: renew});
    const [result, formulas] = [h("output", {}), h("dl", {})];
    const add = (label, input) => {
      input.id = `calculator-${++numInputs}`;
      form.append(h("p", {}, h("label", {htmlFor: input.id}, label), input));
      return input;
    };
    const picker = hasModel && add(say("Model", "模型"),
      h("select", {}, ...[...shapes.keys()].map((name) => option(name, name))));
    if (hasModel) {
      picker.value = "Qwen3-8B";
      const onchange = (event) => readFile(event.target.files[0]);
      add(say("or drop a config.json", "或拖入 config.json"),
        h("input", {type: "file", accept: ".json", onchange, oninput: (e) => e.stopPropagation()}));
      div.ondragover = (event) => event.preventDefault();
      div.ondrop = (event) => {
        event.preventDefault();
        readFile(event.dataTransfer.files[0]);
      };
    }
    const inputs = fields.map(({label, value, min, max, choices}) => add(label, choices
      ? h("select", {}, ...choices.map(([bytes, text]) => option(text, bytes)))
      : h("input", {type: "number", step: "any", min, max, value})));

    function complain(text) {
      result.replaceChildren(h("span", {className: "calculator-error"}, text));
      formulas.replaceChildren();
    }

    async function readFile(file) {
      if (!file) return; // a selection that was cancelled, or dropped text
      try {
        const shape = readConfig(JSON.parse(await file.text()));
        const name = `${file.name} (${shape.layers} ${say("layers", "层")})`;
        if (!shapes.has(name)) picker.append(option(name, name));
        shapes.set(name, shape);
        picker.value = name;
        renew();
      } catch (error) {
        complain(error instanceof SyntaxError
          ? say(`${file.name} is not JSON.`, `${file.name} 不是 JSON。`) : error.message);
      }
    }

    function renew() {
      const [shape, values, wrong] = [shapes.get(picker?.value), {}, []];
      fields.forEach(({name, label, min, max, choices, isWhole, isOptional, ofWindows}, i) => {
        const [input, value] = [inputs[i], Number(inputs[i].value)];
        const isEmpty = input.value === "" && !input.validity.badInput;
        const isRight = choices || (isEmpty && isOptional) || (input.value !== "" && value >= min
          && value <= max && (!isWhole || Number.isInteger(value)));
        input.setAttribute("aria-invalid", !isRight);
        input.parentNode.hidden = Boolean(ofWindows && shape.windows.every((w) => w === null));
        values[name] = isEmpty ? null : value;
        if (isRight) return;
        const kind = isWhole ? say("a whole number", "整数") : say("a number", "数");
        wrong.push(say(`“${label}” must be ${kind} from ${show(min)} to ${show(max)}.`,
          `“${label}”应为 ${show(min)} 到 ${show(max)} 的${kind}。`));
      });
      if (wrong.length > 0) return complain(wrong.join(" "));
      const answer = compute(shape, values);
      result.replaceChildren(h("strong", {}, answer.result), say(" ", "") + answer.detail);
      formulas.replaceChildren(...answer.lines.flatMap(([name, formula, numbers, outcome]) => [
        h("dt", {}, name),
        h("dd", {}, `= ${formula}`, h("br", {}), `= ${numbers} = `, h("b", {}, outcome)),
      ]));
    }

    div.replaceChildren(form, result, formulas);
    renew();
  }

  const fillAll = () => document.querySelectorAll("div[data-calculator]").forEach(fill);
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", fillAll);
  else fillAll();
})();
