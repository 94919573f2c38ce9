// SPDX-License-Identifier: Apache-2.0
// The search of the site runs in a web worker, and browsers start none for pages that are opened as files. There a
// hidden frame takes the worker's place: it runs the worker's script, and this class carries the messages.
class FrameInsteadOfWorker extends EventTarget {
  constructor(address) {
    super();
    this.frame = document.createElement("iframe");
    this.frame.hidden = true;
    document.body.append(this.frame);

    const inside = this.frame.contentWindow;
    inside.document.open();
    inside.document.write("<!doctype html><body></body>");
    inside.document.close();
    inside.postMessage = (data) => this.receive(data);
    inside.importScripts = (...addresses) => this.loadInOrder(addresses);
    this.started = this.load(address);
  }

  // Runs a script in the frame; resolves when it has run.
  load(address) {
    const inside = this.frame.contentWindow.document;
    const script = inside.createElement("script");
    script.src = address;
    return new Promise((resolve, reject) => {
      script.onload = resolve;
      script.onerror = reject;
      inside.body.append(script);
    });
  }

  async loadInOrder(addresses) {
    for (const address of addresses) await this.load(address);
  }

  // A message of the script to the page.
  receive(data) {
    const message = new MessageEvent("message", { data });
    this.dispatchEvent(message);
    if (this.onmessage) this.onmessage(message);
  }

  // A message of the page to the script.
  async postMessage(data) {
    await this.started;
    const inside = this.frame.contentWindow;
    inside.dispatchEvent(new inside.MessageEvent("message", { data: structuredClone(data) }));
  }

  terminate() {
    this.frame.remove();
  }
}

if (location.protocol === "file:") window.Worker = FrameInsteadOfWorker;
