// Search from disk: browsers refuse workers to pages of file://, so the worker's script runs in a hidden frame.
if (location.protocol === "file:") {
  const message = data => new MessageEvent("message", { data });
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.srcdoc = `<script>postMessage = data => frameElement.answer(data)</script><script src="${url}"></script>`;
      frame.answer = data => this.dispatchEvent(message(data));
      this.loaded = new Promise(resolve => frame.addEventListener("load", () => resolve(frame.contentWindow)));
      document.body.append(frame);
    }
    postMessage(data) {
      this.loaded.then(inside => inside.dispatchEvent(message(data)));
    }
  };
}
