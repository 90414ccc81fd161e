//! A bundle of tfexport on the disk: what it is, and its files, each compared with its sum.

use std::{
    collections::HashMap,
    fs,
    path::{Path, PathBuf},
};

use serde::Deserialize;
use sha2::{Digest, Sha256};

use crate::Error;

/// Files of each variant of the decoder; the first that a bundle has is taken.
const VARIANTS: [[&str; 2]; 2] = [["encoder_contrib.onnx", "decoder_contrib.onnx"], ["encoder.onnx", "decoder.onnx"]];
pub const TOKENIZER: &str = "tokenizer.json";
pub const TARGET_TOKENIZER: &str = "target_tokenizer.json";
pub const WEIGHTS: &str = "weights.safetensors";

#[derive(Deserialize)]
pub struct Manifest {
    format_version: u32,
    kind: String,
    files: HashMap<String, File>,
    pub text: Text,
    pub spec: Spec,
}
#[derive(Deserialize)]
struct File {
    sha256: String,
}
#[derive(Deserialize)]
pub struct Text {
    pub source_prefix: Vec<u32>,
    pub source_suffix: Vec<u32>,
    pub target_prefix: Vec<u32>,
}
#[derive(Deserialize)]
pub struct Spec {
    pub max_source_length: usize,
    pub max_target_length: usize,
    pub tokens: Tokens,
}
#[derive(Deserialize)]
pub struct Tokens {
    pub pad: u32,
    pub start: u32,
    pub eos: u32,
    pub unk: Option<u32>,
}

pub struct Bundle {
    pub folder: PathBuf,
    pub manifest: Manifest,
}

impl Bundle {
    pub fn open(folder: PathBuf) -> Result<Self, Error> {
        let manifest = serde_json::from_slice(&read(&folder, "manifest.json")?)?;
        Ok(Self { folder, manifest })
    }

    pub fn has(&self, name: &str) -> bool {
        self.manifest.files.contains_key(name)
    }

    /// The files of encoder and decoder; a bundle that needs more than this program does is refused.
    pub fn graphs(&self) -> Result<[&'static str; 2], Error> {
        let variant = VARIANTS.into_iter().find(|names| names.iter().all(|name| self.has(name)));
        let refused = match variant {
            _ if self.manifest.format_version != 1 => "has a format that is not 1",
            _ if self.manifest.kind != "encoder-decoder" => "is encoder-only and generates no text",
            _ if !self.has(TOKENIZER) => "has no tokenizer; export it from a model directory with a tokenizer.json",
            _ if self.has("generation.json") => {
                "has defaults in generation.json, which greedy decoding does not follow"
            }
            _ if self.has("shortlist.bin") => {
                "has shortlists, which this program does not apply; export it without --shortlist"
            }
            None => "has no decoder in the contrib or the concat variant; export it with --variants concat,contrib",
            Some(names) => return Ok(names),
        };
        Err(format!("the bundle {refused}").into())
    }

    /// Read a file and compare it with its sum.
    pub fn read(&self, name: &str) -> Result<Vec<u8>, Error> {
        let bytes = read(&self.folder, name)?;
        let sum: String = Sha256::digest(&bytes).iter().map(|byte| format!("{byte:02x}")).collect();
        if self.manifest.files.get(name).is_none_or(|file| file.sha256 != sum) {
            return Err(format!("{name} is not the file that the manifest names; copy the bundle again").into());
        }
        Ok(bytes)
    }
}

fn read(folder: &Path, name: &str) -> Result<Vec<u8>, Error> {
    let path = folder.join(name);
    fs::read(&path).map_err(|error| format!("{}: {error}", path.display()).into())
}
