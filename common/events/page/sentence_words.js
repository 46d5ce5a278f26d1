"use strict";
// The sentences of scene 5. English has the noun in the plural: `Watch.saySentence` sees to the 1.
(() => {
  Watch.words({
    "say.run": [
      "the run begins: scheduler {scheduler}, policy {policy}",
      "运行开始：调度器 {scheduler}，策略 {policy}",
    ],
    "say.arrived": [
      "arrives: {n} prompt tokens, at most {most} outputs",
      "到达：prompt {n} 个 token，最多输出 {most} 个",
    ],
    "say.brings": ["comes with: {what}", "附带：{what}"],
    "say.queue": [
      "the queue stands in the order {order} (policy {policy})",
      "队列顺序变为 {order}（策略 {policy}）",
    ],
    "say.admitted": ["is admitted; no prefix of it was cached", "准入；前缀没有命中缓存"],
    "say.admitted.cached": [
      "is admitted with {n} cached tokens: {blocks}",
      "准入，其中 {n} 个 token 命中缓存：{blocks}",
    ],
    "say.returned": ["returns, to be computed again", "恢复运行，需要重新计算"],
    "say.returned.cached": [
      "returns; {n} tokens are still cached: {blocks}",
      "恢复运行，有 {n} 个 token 仍在缓存：{blocks}",
    ],
    "say.preempted": [
      "is preempted: no block is free, and it is itself the next victim; {lost} computed tokens are lost",
      "被抢占：没有空闲块，而下一个该被抢占的正是它自己；已算的 {lost} 个 token 作废",
    ],
    "say.preempted.for": [
      "is preempted, so that {who} gets blocks; {lost} computed tokens are lost",
      "被抢占，为 {who} 腾出块；已算的 {lost} 个 token 作废",
    ],
    "say.preempted.seat": [
      "is preempted: {who} is more urgent and takes its slot; {lost} computed tokens are lost",
      "被抢占：{who} 优先级更高，占了它的席位；已算的 {lost} 个 token 作废",
    ],
    "say.preempted.forced": [
      "is preempted by the debug switch preempt_every; {lost} computed tokens are lost",
      "被调试开关 preempt_every 强制抢占；已算的 {lost} 个 token 作废",
    ],
    "say.finished.stop": ["ends: it sampled an end token", "结束：采样到结束 token"],
    "say.finished.length": [
      "ends: it has reached its limit of {n} outputs",
      "结束：达到输出上限 {n} 个 token",
    ],
    "say.finished.abort": ["is aborted", "被中止"],
    "say.finished.error": ["ends with an error", "因错误结束"],
    "say.cut": ["ends at the stop string “{text}”", "遇到停止字符串“{text}”而结束"],
    "say.snapshot": [
      "watching begins here, in the middle of the run: {running} run, {waiting} wait",
      "从这里开始观看，运行已在中途：{running} 个请求在运行，{waiting} 个在等待",
    ],
    "say.taken": ["takes {blocks} from the free list", "从空闲表取用{blocks}"],
    "say.taken.table": [
      "takes {blocks} from the free list; its table has {n} now",
      "从空闲表取用{blocks}；块表现有 {n} 块",
    ],
    "say.shared": ["shares {blocks}", "共享{blocks}"],
    "say.freed": ["gives up {blocks}", "释放{blocks}"],
    "say.freed.free": ["{blocks} (free now)", "{blocks}（变为空闲）"],
    "say.freed.cached": ["{blocks} (still cached)", "{blocks}（仍在缓存）"],
    "say.freed.used": ["{blocks} (still in use)", "{blocks}（仍被使用）"],
    "say.matched": [
      "finds {n} tokens of its prefix in the cache: {blocks}",
      "前缀有 {n} 个 token 命中缓存：{blocks}",
    ],
    "say.matched.group": ["finds {blocks} in group {group}", "在组 {group} 找到{blocks}"],
    "say.published": ["publishes {blocks}", "发布{blocks}"],
    "say.published.hash": ["publishes {blocks}, hash {hash}", "发布{blocks}，哈希 {hash}"],
    "say.published.group": ["publishes {blocks} in group {group}", "在组 {group} 发布{blocks}"],
    "say.known": [
      "{given} held what {kept} has already: it uses that one",
      "{given} 的内容与{kept} 相同：改用后者",
    ],
    "say.known.ended": [
      "{given} held what {kept} has already, and is given back",
      "{given} 的内容与{kept} 相同，已经归还",
    ],
    "say.known.stays": [
      "{given} held what {kept} has already, and is given back; its table still names {given}",
      "{given} 的内容与{kept} 相同，已经归还；块表里写的却还是{given}",
    ],
    "say.split": ["a node is cut in two in front of {blocks}", "节点在{blocks} 之前拆分为二"],
    "say.evicted": ["{blocks} evicted: unused for longest", "{blocks} 被淘汰：闲置最久"],
    "say.evicted.for": [
      "{blocks} evicted to make blocks free for {who}: unused for longest",
      "{blocks} 被淘汰，给 {who} 腾地方：闲置最久",
    ],
    "say.evicted.taken": [
      "{blocks} reallocated: their old content can no longer be found",
      "{blocks} 原来的内容找不到了：已重新分配",
    ],
    "say.load_begun": [
      "its KV is on its way into {blocks}, from a tier or a store",
      "它的 KV 正从下级存储加载到{blocks}",
    ],
    "say.loaded": [
      "its KV has arrived in {blocks} ({sources}), and is cached",
      "KV 已加载到{blocks}（{sources}），并进入缓存",
    ],
    "say.loaded.nothing": ["its load brought nothing", "加载没有带来任何内容"],
    "say.load_ended": ["its load holds no block any more", "加载不再占用任何块"],
    "say.chunk": [
      "computes a chunk of its prompt: {n} tokens, {left} are left",
      "计算 prompt 的一个 chunk：{n} 个 token，还剩 {left} 个",
    ],
    "say.prompt": [
      "computes {n} prompt tokens, and has its whole prompt now",
      "计算 {n} 个 prompt token，prompt 全部算完",
    ],
    "say.again": [
      "computes {n} tokens again, lost by its preemption",
      "重算 {n} 个因抢占丢失的 token",
    ],
    "say.decode": ["one new token", "一个新 token"],
    "say.drafts": ["{accepted} of {n} draft tokens accepted", "{n} 个草稿 token 接受了 {accepted} 个"],
    "say.rejected": ["{n} rejected, and that KV is taken back", "拒绝 {n} 个，对应的 KV 作废"],
    "say.passed_over": ["is skipped: {reason}", "被跳过：{reason}"],
    "say.parent": [
      "is skipped: {who} is computing the block that it could share",
      "被跳过：{who} 正在计算它可以共享的块",
    ],
    "say.stop": ["admission stops at {who}: {reason}", "准入止于 {who}：{reason}"],
    "say.stop.behind": [
      "admission stops at {who}: {reason}; the {n} after it were not tried",
      "准入止于 {who}：{reason}；后面 {n} 个没有再尝试",
    ],
    "say.stop.nobody": [
      "none is admitted, {n} wait: {reason}",
      "本步没有准入，{n} 个在等：{reason}",
    ],
    "say.stop.others": [
      "no other is admitted, {n} wait: {reason}",
      "没有再准入别的请求，{n} 个在等：{reason}",
    ],
    "say.discarded": [
      "a token was computed in vain: the request had ended",
      "白算了一个 token：请求已经结束",
    ],
    "say.failed": ["the step failed: {error}", "本步失败：{error}"],
    "say.empty": ["nothing was computed", "没有计算任何 token"],
    "say.and": [", ", "、"],
    "say.block": ["block {blocks}", "块 {blocks}"],
    "say.blocks": ["blocks {blocks}", "块 {blocks}"],
    "say.many": ["{n} blocks ({blocks}, …)", "{n} 块（{blocks} 等）"],
    "say.host": ["{n} from host memory", "主机内存 {n} 块"],
    "say.disk": ["{n} from disk", "磁盘 {n} 块"],
    "say.store": ["{n} from a store", "外部存储 {n} 块"],
  });
})();
