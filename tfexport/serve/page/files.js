// Choose, drop or record the file of a model that reads audio or images.

import { byId } from "./dom.js";

const TITLES = { text: "Text", audio: "Audio", image: "Image", features: "Features" };

let file = null;
let recorder = null;
let onChange = () => {};

/** Return the chosen file, or null. */
export const chosenFile = () => file;

/** Show the fields for a kind of source, without a file. */
export function showSource(kind) {
  const isFile = kind === "audio" || kind === "image";
  stop();
  byId("source-title").textContent = TITLES[kind];
  byId("source-title").htmlFor = isFile ? "file" : "text";
  byId("text").hidden = kind !== "text";
  byId("upload").hidden = !isFile;
  byId("no-processor").hidden = kind !== "features";
  byId("file").accept = `${kind}/*`;
  // Browsers offer the microphone only to pages from this machine or over HTTPS.
  byId("record").hidden = kind !== "audio" || !navigator.mediaDevices;
  choose(null);
}

function choose(chosen) {
  file = chosen;
  byId("file-name").textContent = file ? file.name : "Choose a file, or drop it here";
  byId("file-size").textContent = file ? `${(file.size / 1000).toLocaleString("en", { maximumFractionDigits: 1 })} kB` : "";
  byId("preview").hidden = true;
  if (file?.type.startsWith("image/")) preview(file);
  onChange();
}

function preview(image) {
  const reader = new FileReader();
  reader.onload = () => {
    if (image !== file) return;
    byId("preview").src = reader.result;
    byId("preview").hidden = false;
  };
  reader.readAsDataURL(image);
}

function stop() {
  if (recorder?.state === "recording") recorder.stop();
}

async function record() {
  if (recorder) {
    stop();
    return;
  }
  try {
    const stream = await navigator.mediaDevices.getUserMedia({ audio: { channelCount: 1 } });
    const parts = [];
    recorder = new MediaRecorder(stream);
    recorder.ondataavailable = ({ data }) => parts.push(data);
    recorder.onstop = async () => {
      recorder = null;
      stream.getTracks().forEach((track) => track.stop());
      byId("record").textContent = "Record";
      if (!byId("record").hidden) choose(new File([await wavOf(new Blob(parts))], "recording.wav", { type: "audio/wav" }));
    };
    recorder.start();
    byId("record").textContent = "Stop";
  } catch (error) {
    byId("file-size").textContent = `The microphone cannot be used: ${error.message}`;
  }
}

/** Return a recording as 16-bit WAV, which a server reads without further packages. */
async function wavOf(blob) {
  const context = new AudioContext();
  const audio = await context.decodeAudioData(await blob.arrayBuffer());
  await context.close();
  const samples = Int16Array.from(audio.getChannelData(0), (sample) => Math.max(-1, Math.min(1, sample)) * 32767);
  const head = new DataView(new ArrayBuffer(44));
  const texts = { 0: "RIFF", 8: "WAVEfmt ", 36: "data" };
  for (const [start, text] of Object.entries(texts)) {
    [...text].forEach((letter, place) => head.setUint8(Number(start) + place, letter.charCodeAt(0)));
  }
  const rate = audio.sampleRate;
  const [sizes, shorts] = [{ 4: 36 + samples.byteLength, 16: 16, 24: rate, 28: 2 * rate, 40: samples.byteLength }, { 20: 1, 22: 1, 32: 2, 34: 16 }];
  for (const [place, value] of Object.entries(sizes)) head.setUint32(Number(place), value, true);
  for (const [place, value] of Object.entries(shorts)) head.setUint16(Number(place), value, true);
  return new Blob([head, samples]);
}

/** Connect the fields; `changed` is called for each new file. */
export function connect(changed) {
  onChange = changed;
  const drop = byId("drop");
  byId("file").addEventListener("change", ({ target }) => target.files.length > 0 && choose(target.files[0]));
  byId("record").addEventListener("click", record);
  for (const kind of ["dragover", "dragleave", "drop"]) {
    drop.addEventListener(kind, (event) => {
      event.preventDefault();
      drop.classList.toggle("over", kind === "dragover");
      if (kind === "drop" && event.dataTransfer.files.length > 0) choose(event.dataTransfer.files[0]);
    });
  }
}
