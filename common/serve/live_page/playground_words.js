// What the playground says, and the prompts that it offers.
Watch.words({
  "play.title": ["Try it", "试一试"],
  "play.one": ["One prompt", "一条 prompt"],
  "play.eight": ["Eight at once", "同时八条"],
  "play.chat": ["A chat", "对话"],
  "play.tool": ["A tool call", "工具调用"],
  "play.prompt": ["Prompts, with a line of --- between two", "prompt，多条之间用一行 --- 隔开"],
  "play.count": ["{n} prompts, with a line of --- between two.", "{n} 条 prompt，之间用一行 --- 隔开。"],
  "play.count.one": ["1 prompt. A line of --- begins another.", "1 条 prompt。加一行 --- 可再写一条。"],
  "play.count.chat": ["A chat: your message, its answer and so on, with a line of --- between two.",
    "对话：先写你的消息，再写回答，依此类推，之间用一行 --- 隔开。"],
  "play.kind": ["send as", "发送为"],
  "play.kind.text": ["text", "文本"],
  "play.kind.chat": ["chat", "对话"],
  "play.kind.tool": ["tool call", "工具调用"],
  "play.model": ["model", "模型"],
  "play.schema": ["JSON schema of the answer", "回答的 JSON schema"],
  "play.schema.tool": ["JSON schema of the tool's arguments", "工具参数的 JSON schema"],
  "play.run": ["Run", "运行"],
  "play.stop": ["Stop", "停止"],
  "play.key": ["Key", "密钥"],
  "play.use": ["Use it", "使用"],
  "play.no_number": ["{name} must be a number, got “{given}”.", "{name} 必须是数字，收到的是“{given}”。"],
  "play.no_json": ["The schema is no JSON: {why}", "schema 不是 JSON：{why}"],
  "play.stopped": ["stopped", "已停止"],
  "play.sent": ["sent", "已发送"],
  "play.blocks": ["{n} blocks", "{n} 块"],
  "play.shared": ["{n} shared", "共享 {n} 块"],
  "play.cached": ["{n} tokens found in the cache", "缓存命中 {n} 个 token"],
  "play.preempted": ["preempted {n} times", "被抢占 {n} 次"],
  "play.preempted.one": ["preempted once", "被抢占 1 次"],
  "play.ended": ["ended: {reason}", "结束：{reason}"],
  "play.answers": ["Answers", "回答"],
  "play.show": ["Show {request} on the right", "在右侧显示 {request}"],
});

const STACK = `class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

`;
Watch.examples = {
  one: [`${STACK.split("        self.items.append")[0].trimEnd()}`],
  eight: [
    `${STACK}    def pop(self):`,
    `${STACK}    def peek(self):`,
    `${STACK}    def size(self):`,
    `${STACK}    def clear(self):`,
    "def is_prime(n):\n    for",
    "import os\nimport sys\n\ndef main():",
    "def mean(values):\n    return",
    "def read_lines(path):\n    with open(path) as",
  ],
  chat: ["Return the sum of a list of numbers."],
  tool: ["What is the weather in Oslo?"],
};
Watch.toolSchema = `{
  "type": "object",
  "properties": {"city": {"enum": ["Oslo", "Lima", "Nairobi"]}},
  "required": ["city"],
  "additionalProperties": false
}`;
