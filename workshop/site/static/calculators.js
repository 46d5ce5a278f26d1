// The site's calculators: the requests that fit into KV memory, the least time of a decode step, the
// gain of speculation. Each <div class="calculator" data-calculator="kv"> is filled when the page is
// loaded. The arithmetic is the book's Python again: `test_calculators.py` compares the two.
"use strict";
(() => {
  const say = (english, chinese) => (document.documentElement.lang.startsWith("zh") ? chinese : english);
  const check = (isRight, english, chinese) => {
    if (!isRight) throw new Error(say(english, chinese));
  };
  const sum = (numbers) => numbers.reduce((total, number) => total + number, 0);

  // -- models: layers, hidden size, MLP, heads, KV heads, size of a head, vocabulary

  const model = ([layers, hidden, inner, heads, kvHeads, headDim, vocab], others) => ({layers, hidden,
    inner, heads, kvHeads, headDim, vocab, gpus: 1, isTied: false, experts: null,
    windows: Array(layers).fill(null), ...others});
  // Source: huggingface.co/OWNER/NAME/blob/main/config.json of Qwen/Qwen3-0.6B, -8B, -30B-A3B,
  // meta-llama/Llama-3.1-8B, -70B, mistralai/Mistral-7B-v0.1, Mixtral-8x7B-v0.1, google/gemma-3-1b-it
  const MODELS = {
    "Qwen3-0.6B": model([28, 1024, 3072, 16, 8, 128, 151936], {isTied: true}),
    "Qwen3-8B": model([36, 4096, 12288, 32, 8, 128, 151936]),
    "Qwen3-30B-A3B": model([48, 2048, 6144, 32, 4, 128, 151936],
      {experts: {number: 128, active: 8, inner: 768, layers: 48}}),
    "Llama 3.1 8B": model([32, 4096, 14336, 32, 8, 128, 128256]),
    "Llama 3.1 70B": model([80, 8192, 28672, 64, 8, 128, 128256]),
    "Mistral 7B v0.1": model([32, 4096, 14336, 32, 8, 128, 32000], {windows: Array(32).fill(4096)}),
    "Mixtral 8x7B": model([32, 4096, 14336, 32, 8, 128, 32000],
      {experts: {number: 8, active: 2, inner: 14336, layers: 32}}),
    "Gemma 3 1B": model([26, 1152, 6912, 4, 1, 256, 262144],
      {isTied: true, windows: Array.from({length: 26}, (_, i) => ((i + 1) % 6 > 0 ? 512 : null))}),
  };

  // The weights in matrices: `every` step reads these, an `expert` has these in all layers, `all`.
  function countWeights({layers, hidden, heads, kvHeads, gpus, headDim, inner, vocab, isTied, experts}) {
    const {number, inner: expertInner, layers: sparse} = experts ?? {number: 0, inner: 0, layers: 0};
    const every = layers * 2 * hidden * headDim * (heads + kvHeads) + gpus * sparse * hidden * number
      + (layers - sparse) * 3 * hidden * inner + vocab * hidden;
    const expert = sparse * 3 * hidden * expertInner;
    return {every, expert, all: every + number * expert + (isTied ? 0 : vocab * hidden)};
  }

  // -- KV memory: kv_budget.py, grouped_kv_memory.py, layer_groups.py, sharded_model.py

  // Tensor parallelism: all GPUs together. Each has at least one KV head, and the experts' routers.
  const onGPUs = (shape, gpus) => ({...shape, gpus, kvHeads: Math.max(shape.kvHeads, gpus)});
  const numbersOfGPUs = ({heads, kvHeads}) => Array.from({length: heads}, (_, i) => i + 1)
    .filter((n) => heads % n === 0 && (kvHeads % n === 0 || n % kvHeads === 0));

  // Groups of `size` layers that share a block table. A window of `longest` tokens hides nothing.
  function dealLayers(windows, longest) {
    const all = windows.map((window) => (window !== null && window < longest ? window : null));
    const kinds = [...new Set(all)].sort((one, other) => (one ?? 0) - (other ?? 0)); // null first
    const numbers = kinds.map((kind) => all.filter((other) => other === kind).length);
    const unused = (size) => sum(numbers.map((n) => Math.ceil(n / size) * size - n));
    const [few, many] = [Math.min(...numbers), Math.max(...numbers)];
    const size = unused(many) < unused(few) ? many : few;
    return {size, windows: kinds.flatMap((kind, i) => Array(Math.ceil(numbers[i] / size)).fill(kind))};
  }

  // `total` and `others` are those of each GPU, `weights` and the result those of all.
  const bytesForKV = (total, share, weights, others, gpus = 1) =>
    Math.max(0, gpus * Math.trunc(total * share - others) - weights);
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

  // -- the least time of a decode step: gpu_work.py; activations have 2 bytes a number

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
    return {everyStep: every, experts: number * expert, layerTokens: keys, tokenWeights: used, weights, kv,
      bytes, operations, memoryMs, arithmeticMs, ms: Math.max(memoryMs, arithmeticMs)};
  }

  // -- speculation: acceptance.py, draft_acceptance.py

  const expectedTokens = (acceptance, drafts) =>
    sum(Array.from({length: drafts + 1}, (_, i) => acceptance ** i));

  const expectedSpeedup = (acceptance, drafts, draftCost, verifyCost) =>
    expectedTokens(acceptance, drafts) / (verifyCost + drafts * draftCost);

  globalThis.bookCalculators = {MODELS, countWeights, onGPUs, numbersOfGPUs,
    dealLayers, bytesForKV, kvBytesPerToken, fitRequests, decodeFloor, expectedTokens, expectedSpeedup};

  // -- what is asked (`notes`: vLLM's name, a hint); sentences; lines of a name, a formula, an outcome

  const show = (number) => number.toLocaleString("en",
    Math.abs(number) >= 1000 ? {maximumFractionDigits: 0} : {maximumSignificantDigits: 4});
  const about = (number) => number.toLocaleString("en", {maximumSignificantDigits: 3}); // in sentences
  const memory = (bytes, write = show) => {
    const power = [2 ** 10, 2 ** 20, 2 ** 30].filter((unit) => bytes >= unit).length;
    return `${write(bytes / 1024 ** power)} ${["B", "KiB", "MiB", "GiB"][power]}`;
  };
  const giga = (bytes) => `${show(bytes / 1e9)} GB`;

  const real = (name, label, value, min, max, ...notes) => ({name, label, value, min, max, notes});
  const count = (name, label, value, max, ...notes) =>
    ({...real(name, label, value, 1, max, ...notes), isWhole: true});
  const pick = (name, label, choices, ...notes) => ({name, label, choices, notes});
  const FORMATS = [[2, "bfloat16"], [1, "8 bit"], [4, "float32"]];
  const KV_IN = pick("kvBytes", say("KV cache in", "KV 缓存的格式"), FORMATS, "kv_cache_dtype");
  const WEIGHTS_IN = pick("weightBytes", say("Weights in", "权重的格式"), [...FORMATS, [0.5, "4 bit"]]);

  const CALCULATORS = {};
  CALCULATORS.kv = {
    hasModel: true,
    fields: [
      count("gpus", say("GPUs", "GPU 数"), 1, 1e4, "tensor_parallel_size"),
      real("total", say("Memory of each (GiB)", "每块的显存（GiB）"), 24, 0.001, 1e6),
      real("share", say("Share used", "使用比例"), 0.9, 0.01, 1, "gpu_memory_utilization"),
      {...WEIGHTS_IN, choices: [...WEIGHTS_IN.choices, [0, say("not in it", "不在其中")]]},
      real("others", say("Activations etc. (GiB)", "激活值等（GiB）"), 1.5, 0, 1e6, "",
        say("On each GPU: activations of the largest step, CUDA context, graphs. vLLM measures them.",
          "每块 GPU 上最大一步的激活值、CUDA context 和 graph，vLLM 启动时实测。")),
      KV_IN,
      count("tokens", say("Tokens of a request", "一个请求的 token 数"), 2048, 1e8, "max_model_len"),
      count("blockSize", say("Block size (tokens)", "块大小（token）"), 16, 1e6, "block_size"),
      count("stepTokens", say("Tokens of a step", "一步的 token 数"), 2048, 1e6, "max_num_batched_tokens",
        say("Asked because layers with a window hold the blocks of the window and of one step.",
          "这个模型有带窗口的层：那里一个请求只占窗口加一步的块，所以要填。")),
    ],
    compute(model, {gpus, total, share, weightBytes, others, kvBytes, tokens, blockSize, stepTokens}) {
      const fit = (number) => {
        const shape = onGPUs(model, number);
        const weights = countWeights(shape).all * weightBytes;
        const bytes = bytesForKV(total * 2 ** 30, share, weights, others * 2 ** 30, number);
        return {shape, weights, bytes,
          ...fitRequests(shape, {bytes, itemsize: kvBytes, blockSize, length: tokens, stepTokens})};
      };
      const possible = numbersOfGPUs(model);
      check(possible.includes(gpus), `GPUs must be ${possible.join(", ")} for this model's heads.`,
        `按这个模型的头数，GPU 数应为 ${possible.join("、")}。`);
      const enough = possible.find((number) => number > gpus && fit(number).requests > 0);
      const {shape, weights, bytes, groups: {size, windows}, blockBytes, blocks, perRequest, requests} =
        fit(gpus);
      const token = kvBytesPerToken(shape, kvBytes);
      const [whole, layers] = ["⌈tokens / block_size⌉", windows.length > 1 ? "group_layers" : "layers"];
      const kvHeads = gpus > model.kvHeads ? "max(kv_heads, gpus)" : "kv_heads";
      const ofGroups = [...new Set(windows)].map((window) => {
        const times = windows.filter((other) => other === window).length;
        const ofWindow = `min(${whole}, ⌈(${show(window ?? 0)} − 1 + step_tokens) / block_size⌉ + 1)`;
        return (windows.length > 1 ? `${times} × ` : "") + (window === null ? whole : ofWindow);
      });
      const usable = gpus * total * share * 2 ** 30;
      const need = weights > usable ? weights : weights + gpus * others * 2 ** 30;
      const [left, ofRequest, needed, has] =
        [bytes, perRequest * blockBytes, need, usable].map((number) => memory(number, about));
      return {
        result: need > usable
          ? say(`The weights${weights > usable ? "" : " and activations"}, ${needed}, are more than the `
            + `usable ${has}.`, `权重${weights > usable ? "" : "和激活值"}有 ${needed}，超过可用的 ${has}。`)
          : say(`${left} of KV memory hold ${show(requests)} request${requests === 1 ? "" : "s"} of `
            + `${show(tokens)} tokens.`,
          `${left} 的 KV 内存放得下 ${show(requests)} 个 ${show(tokens)} token 的请求。`),
        detail: say(`A request takes ${ofRequest} in ${show(perRequest)} blocks.`,
          `一个请求占 ${ofRequest}，共 ${show(perRequest)} 块。`) + (requests > 0 || !enough ? ""
          : say(` ${enough} GPUs of this size hold one.`, `要 ${enough} 块这样的 GPU 才放得下一个。`)),
        symbols: {memory: `${show(total)} GiB`, activations: `${show(others)} GiB`, groupLayers: size,
          numWeights: countWeights(shape).all, weights: memory(weights), kvMemory: bytes, nullBlock: 1,
          block: blockBytes, blocks, requestBlocks: perRequest},
        lines: [
          [say("KV of a token", "一个 token 的 KV"), `2 × layers × ${kvHeads} × head_dim × kv_bytes`,
            `${show(token)} B = ${memory(token)}`],
          [say("Weights", "权重"), "num_weights × weight_bytes", memory(weights)],
          [say("KV memory", "KV 内存"), "max(0, gpus × (memory × share − activations) − weights)",
            memory(bytes)],
          [say("A block", "一块"), `2 × ${layers} × block_size × ${kvHeads} × head_dim × kv_bytes`,
            memory(blockBytes)],
          [say("Blocks", "块数"), "⌊kv_memory / block⌋", show(blocks)],
          [say("Blocks of a request", "一个请求的块数"), ofGroups.join(" + "), show(perRequest)],
          [say("Requests", "请求数"), "⌊max(0, blocks − null_block) / request_blocks⌋", show(requests)],
        ],
      };
    },
  };

  CALCULATORS.step = {
    hasModel: true,
    fields: [
      count("requests", say("Requests in the step", "一步的请求数"), 64, 1e6),
      count("tokens", say("Tokens of a request", "一个请求的 token 数"), 1024, 1e8),
      WEIGHTS_IN, KV_IN,
      real("bandwidth", say("Bandwidth (GB/s)", "带宽（GB/s）"), 3350, 0.001, 1e7),
      real("rate", say("Arithmetic (TFLOP/s)", "算力（TFLOP/s）"), 989, 0.001, 1e7),
      {...real("measured", say("Measured (ms)", "实测（ms）"), "", 1e-6, 1e9), isOptional: true},
    ],
    compute(shape, values) {
      const cost = {...values, ...decodeFloor(shape, {...values, context: values.tokens})};
      const {requests, measured, weights, kv, bytes, operations, memoryMs, arithmeticMs, ms} = cost;
      const flops = `${show(operations / 1e12)} TFLOP`;
      const {number, active} = shape.experts ?? {};
      const seen = shape.windows.every((window) => window === null) ? "tokens × layers" : "layer_tokens";
      const bound = memoryMs < arithmeticMs ? say("arithmetic", "算力") : say("bandwidth", "带宽");
      const [perSecond, percent] = [about(1000 * requests / ms), `${about(100 * ms / measured)}%`];
      return {
        result: say(`The step takes at least ${about(ms)} ms, bound by ${bound}.`,
          `这一步至少要 ${about(ms)} ms，受限于${bound}。`),
        detail: say(`That is at most ${perSecond} tokens a second.`, `每秒最多 ${perSecond} 个 token。`)
          + (measured && say(` The measured ${show(measured)} ms are ${percent} of the roofline.`,
            `实测的 ${show(measured)} ms 达到 roofline 的 ${percent}。`)),
        symbols: {...cost, active, numExperts: number, weights: giga(weights), kv: giga(kv),
          activations: giga(bytes - weights - kv), bytes: giga(bytes), operations: flops,
          bandwidth: `${show(values.bandwidth)} GB/s`, arithmetic: `${show(values.rate)} TFLOP/s`},
        lines: [
          [say("Weights", "权重"), (number ? "(every_step + experts × (1 − (1 − active / num_experts)"
            + "^requests))" : "every_step") + " × weight_bytes", giga(weights)],
          ["KV", `2 × requests × ${seen} × kv_heads × head_dim × kv_bytes`, giga(kv)],
          [say("Bytes", "字节"), "weights + kv + activations", giga(bytes)],
          [say("Operations", "运算"), "2 × requests × token_weights + "
            + `4 × requests × ${seen} × heads × head_dim`, flops],
          [say("Least time", "最短时间"), "max(bytes / bandwidth, operations / arithmetic)",
            `max(${show(memoryMs)}, ${show(arithmeticMs)}) ms = ${show(ms)} ms`],
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
        result: say(`Speculation ${speedup < 1 ? "loses" : "pays"}: ${about(speedup)} times the speed of `
          + "plain decoding.", `${speedup < 1 ? "不划算" : "划算"}：速度是普通解码的 ${about(speedup)} 倍。`),
        detail: say(`A pass yields ${about(tokens)} tokens and costs ${about(v + k * c)} plain steps.`,
          `一次前向得到 ${about(tokens)} 个 token，代价是 ${about(v + k * c)} 个普通步。`),
        symbols: {tokens},
        lines: [
          [say("Tokens a pass", "每次前向的 token 数"), "1 + a + … + a^k", show(tokens)],
          [say("Speed-up", "加速比"), "tokens / (v + k × c)", show(speedup)],
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

  function fill(div) {
    const {hasModel, fields, compute} = CALCULATORS[div.dataset.calculator];
    const form = h("form", {oninput: () => attempt(renew)});
    const [result, formulas] = [h("output", {}), h("dl", {})];
    const add = (input, label, parameter, hint = "") => {
      input.id = `calculator-${++numInputs}`;
      const small = h("small", {}, parameter ? say(` (${parameter})`, `（${parameter}）`) : "");
      const named = h("label", {htmlFor: input.id}, label, small);
      form.append(h("p", {}, named, input, h("small", {}, hint)));
      return input;
    };
    const known = Object.entries(MODELS).map(([name, shape]) =>
      h("option", {shape, selected: name === "Qwen3-8B"}, name));
    const picker = hasModel && add(h("select", {}, ...known), say("Model", "模型"));
    const inputs = fields.map(({label, notes, value, min, max, choices, isWhole, isOptional}) =>
      add(choices ? h("select", {}, ...choices.map(([bytes, text]) => h("option", {value: bytes}, text)))
        : h("input", {type: "number", min, max, step: isWhole ? 1 : "any", value,
          required: !isOptional}), label, ...notes));

    function attempt(action) {
      try {
        action();
      } catch ({message}) {
        result.replaceChildren(h("span", {className: "calculator-error"}, message));
        formulas.replaceChildren();
      }
    }

    function renew() {
      const [shape, values] = [picker?.selectedOptions[0].shape, {}];
      fields.forEach(({name, label, min = 0, max = 0, isWhole}, i) => {
        const {parentNode, value, validity} = inputs[i];
        parentNode.hidden = name === "stepTokens" && shape.windows.every((window) => window === null);
        values[name] = value && Number(value);
        check(validity.valid,
          `“${label}” must be a ${isWhole ? "whole " : ""}number from ${show(min)} to ${show(max)}.`,
          `“${label}”应为 ${show(min)} 到 ${show(max)} 的${isWhole ? "整" : ""}数。`);
      });
      const {result: sentence, detail, symbols, lines} = compute(shape, values);
      const known = {...shape, ...values, ...symbols};
      const camelCase = (word) => word.replace(/_./g, ([, letter]) => letter.toUpperCase());
      const valueOf = (word) => show(known[camelCase(word)] ?? word);
      result.replaceChildren(h("strong", {}, sentence), say(" ", "") + detail);
      formulas.replaceChildren(...lines.flatMap(([name, formula, outcome]) => [
        h("dt", {}, name),
        h("dd", {}, `= ${formula}`, h("br", {}), `= ${formula.replace(/[a-z]\w*/gi, valueOf)} = `,
          h("b", {}, outcome)),
      ]));
    }

    div.replaceChildren(form, result, formulas);
    attempt(renew);
  }

  document.addEventListener("DOMContentLoaded", () =>
    document.querySelectorAll("div[data-calculator]").forEach(fill));
})();
