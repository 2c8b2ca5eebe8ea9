// Search without a server: from the disk a browser starts no worker, so the script of the search runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      frame.srcdoc = `<script src="${url}"></${"script"}>`
      this.started = new Promise(resolve => {
        frame.onload = () => {
          frame.contentWindow.postMessage = data => this.dispatchEvent(new MessageEvent("message", {data}))
          resolve(frame.contentWindow)
        }
      })
      document.documentElement.append(frame)
    }
    postMessage(data) {
      this.started.then(inside => inside.dispatchEvent(new MessageEvent("message", {data})))
    }
    terminate() {}
  }
}
