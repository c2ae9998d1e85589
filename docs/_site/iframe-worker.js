/* Search runs in a Worker, which browsers refuse to start for pages that are opened from disk. There, a
 * hidden frame stands in for it. The theme would load such a script from the network instead, and knows
 * it by the name IFrameWorker. */
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      const inside = frame.contentWindow
      const script = inside.document.createElement("script")
      inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      this.frame = inside
      this.ready = new Promise(resolve => { script.onload = resolve })
      script.src = url
      inside.document.body.append(script)
    }
    postMessage(data) {
      this.ready.then(() => this.frame.dispatchEvent(new MessageEvent("message", { data })))
    }
  }
}
