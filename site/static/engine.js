// The engine in a worker of its own: the scheduler in Python, the model in `llama.js`. A message {prompt, max} adds a request,
// {stop: true} ends all; back come {header}, {name, prompt, pieces}, {line, texts, finished}, {idle} and {failed}.

import { Llama, Tokenizer } from "./llama.js";

const BLOCKS = 41;
const BLOCK_SIZE = 16;
const here = (name) => new URL(name, import.meta.url).href;
const json = (name) => fetch(here(`model/${name}`)).then((answer) => answer.json());

async function boot() {
  const sources = fetch(here("sources.zip")).then((answer) => answer.arrayBuffer());
  const weights = fetch(here("model/model.safetensors")).then((answer) => answer.arrayBuffer());
  const { loadPyodide } = await import(here("pyodide/pyodide.mjs"));
  const python = await loadPyodide({ indexURL: here("pyodide/") });
  python.unpackArchive(await sources, "zip", { extractDir: "/sources" });
  python.runPython("import sys; sys.path.insert(0, '/sources')");
  const tokenizer = new Tokenizer(await json("tokenizer.json"));
  const model = new Llama(await json("config.json"), await weights, BLOCKS * BLOCK_SIZE);
  const forward = (batch) => JSON.stringify(model.forward(JSON.parse(batch)));
  const engine = python.pyimport("minivllm_lab.engines.page_engine").PageEngine(forward, BLOCKS);
  return { tokenizer, engine };
}

const booted = boot();
const generated = new Map(); // token ids of each request
let running = false;
booted.then(({ engine }) => postMessage({ header: JSON.parse(engine.header()) }), (error) => postMessage({ failed: `${error}` }));

onmessage = async ({ data }) => {
  const { tokenizer, engine } = await booted;
  try {
    if (data.stop) engine.abort();
    else add(tokenizer, engine, data);
  } catch (error) {
    postMessage({ failed: `${error}`.trim().split("\n").at(-1).replace(/^[\w.]*Error: /, "") });
  }
  if (!running) run(tokenizer, engine);
};

function add(tokenizer, engine, { prompt, max }) {
  const ids = tokenizer.encode(prompt);
  const name = engine.add(ids, max);
  generated.set(name, []);
  postMessage({ name, prompt, tokens: ids.length });
}

// Step after step, with a pause for messages between them.
async function run(tokenizer, engine) {
  running = true;
  for (let told = engine.step(); told; told = engine.step()) {
    const { tokens, finished, line } = JSON.parse(told);
    for (const [name, ids] of Object.entries(tokens)) generated.get(name).push(...ids);
    const texts = Object.fromEntries(Object.keys(tokens).map((name) => [name, tokenizer.decode(generated.get(name))]));
    postMessage({ line, texts, finished });
    await new Promise((done) => setTimeout(done));
  }
  running = false;
  postMessage({ idle: true });
}
