// Browsers start no Web Worker for a page that is opened as a file. The search of the site needs one.
// This class runs the worker's script in a hidden frame instead. A page from a server uses the browser's own Worker.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.waiting = []; // messages that were posted before the script had loaded
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.documentElement.append(this.frame);
      const inside = this.frame.contentWindow;
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const load = (source) =>
        new Promise((resolve, reject) => {
          const script = inside.document.createElement("script");
          Object.assign(script, { src: source, onload: resolve, onerror: reject });
          inside.document.head.append(script);
        });
      inside.importScripts = (...sources) =>
        sources.reduce((before, source) => before.then(() => load(source)), Promise.resolve());
      load(new URL(url, location.href).href).then(() => {
        this.deliver = (data) => inside.dispatchEvent(new MessageEvent("message", { data }));
        this.waiting.forEach(this.deliver);
      });
    }

    postMessage(data) {
      if (this.deliver) this.deliver(data);
      else this.waiting.push(data);
    }

    terminate() {
      this.frame.remove();
    }
  };
}
