"use strict";
// Any event in a few words, for where there is no room for more.
(() => {
  const {t} = Watch;
  Watch.words({
    "said.none": ["nothing", "无"],
    "said.run": ["a run", "运行记录"],
    "said.snapshot": ["watching begins in the middle of the run", "从运行中途开始观看"],
    "said.arrived": ["{request} arrives", "{request} 到达"],
    "said.queue": ["the queue is {order}", "队列为 {order}"],
    "said.admitted": ["{request} is admitted with {num_cached_tokens} tokens found",
      "{request} 准入，命中 {num_cached_tokens} 个 token"],
    "said.preempted": ["{request} is preempted", "{request} 被抢占"],
    "said.finished": ["{request} ends ({reason})", "{request} 结束（{reason}）"],
    "said.cut": ["{request} is cut at a stop string", "{request} 在停止串处截断"],
    "said.taken": ["{request} takes blocks {blocks}", "{request} 取走块 {blocks}"],
    "said.shared": ["{request} shares blocks {blocks}", "{request} 共享块 {blocks}"],
    "said.freed": ["{request} gives back blocks {blocks}", "{request} 释放块 {blocks}"],
    "said.table": ["{request} has blocks {blocks} in its table", "{request} 的块表写入 {blocks}"],
    "said.matched": ["{request} finds blocks {blocks}", "{request} 命中块 {blocks}"],
    "said.published": ["{request} publishes blocks {kept}", "{request} 发布块 {kept}"],
    "said.split": ["a node is split at block {block}", "节点在块 {block} 处拆分"],
    "said.evicted": ["blocks {blocks} are evicted", "淘汰块 {blocks}"],
    "said.load_begun": ["a load begins for {request}", "{request} 开始加载"],
    "said.loaded": ["the load of {request} is there", "{request} 加载完成"],
    "said.load_ended": ["the load of {request} is over", "{request} 的加载收尾"],
    "said.planned": ["the plan computes {plan}", "计划计算 {plan}"],
    "said.computed": ["the new tokens are {tokens}", "新 token 为 {tokens}"],
    "said.updated": ["the step is over", "这一步结束"],
    "said.failed": ["the step fails", "这一步失败"],
  });

  const MOST = 6; // items of a list
  const list = (items) => items.slice(0, MOST).join(", ") + (items.length > MOST ? ", …" : "");
  const tokens = (event) => Object.entries(event.tokens).map(
    ([id, ids]) => `${Watch.label(id)}: “${(event.pieces[id] ?? ids).join("”, “")}”`);
  const plan = (event) => event.requests.map(
    (id, i) => `${Watch.label(id)} ${event.num_tokens[i]}`);

  Watch.eventWords = (event) => {
    if (event === undefined) return t("said.none");
    const values = {...event};
    for (const [name, value] of Object.entries(event)) {
      if (Array.isArray(value)) values[name] = list(value);
    }
    values.request = event.request == null ? "?" : Watch.name(event.request);
    if (event.kind === "planned") values.plan = list(plan(event));
    if (event.kind === "computed") values.tokens = list(tokens(event));
    return t(`said.${event.kind}`, values);
  };
})();
