// Python in a worker of its own, so that a widget that computes never holds up the page. A message to it is a text for
// widgets/shell/page.py, or a number, which it sends back as a sign of life.

const here = (name) => new URL(name, import.meta.url).href;

async function boot() {
  const sources = fetch(here("sources.zip")).then((answer) => answer.arrayBuffer());
  const { loadPyodide } = await import(here("pyodide/pyodide.mjs"));
  const python = await loadPyodide({ indexURL: here("pyodide/") });
  python.unpackArchive(await sources, "zip", { extractDir: "/sources" });
  python.runPython("import sys; sys.path.insert(0, '/sources')");
  return python.pyimport("widgets.shell.page").Page((text) => postMessage(text));
}

const page = boot();
page.then(() => postMessage("ready"), (error) => postMessage(`failed: ${error}`));
onmessage = async ({ data }) => (typeof data === "number" ? postMessage(data) : (await page).heard(data));
