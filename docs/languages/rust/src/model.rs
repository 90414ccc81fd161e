//! A bundle in ONNX Runtime: texts in, texts out, decoded greedily.

use std::collections::HashMap;

use ort::memory::Allocator;
use ort::session::{HasSelectedOutputs, OutputSelector, RunOptions, Session, SessionInputValue};
use ort::value::{DynTensor, DynTensorValueType, DynValue, Outlet, Tensor};
use serde::Serialize;

use crate::Error;
use crate::bundle::{Bundle, Manifest, TARGET_TOKENIZER, TOKENIZER, WEIGHTS};
use crate::vocabulary::Vocabulary;

type Feeds = HashMap<String, DynValue>;

#[derive(Serialize)]
pub struct Answer {
    pub text: String,
    pub token_ids: Vec<u32>,
    pub finish_reason: &'static str, // "eos" or "length"
}

pub struct Model {
    manifest: Manifest,
    source: Vocabulary,
    target: Vocabulary,
    encoder: Session,
    decoder: Session,
    inputs: Vec<String>,
    caches: Vec<String>,
    outputs: RunOptions<HasSelectedOutputs>,
}

impl Model {
    pub fn load(bundle: Bundle, threads: usize) -> Result<Self, Error> {
        let [encoder, decoder] = bundle.graphs()?;
        for name in [encoder, decoder, WEIGHTS] {
            bundle.read(name)?;
        }
        let open = |name: &str| -> ort::Result<Session> {
            Session::builder()?.with_intra_threads(threads)?.commit_from_file(bundle.folder.join(name))
        };
        let (encoder, decoder) = (open(encoder)?, open(decoder)?);
        let (tokens, around) = (&bundle.manifest.spec.tokens, &bundle.manifest.text);
        let vocabulary = |name: &str, special: &[u32]| Vocabulary::parse(&bundle.read(name)?, tokens.unk, special);
        let ends = [tokens.pad, tokens.start, tokens.eos];
        // Where the target has ids of its own, its start and end are ordinary words of the source.
        let (target, both) = if bundle.has(TARGET_TOKENIZER) { (TARGET_TOKENIZER, 1) } else { (TOKENIZER, 3) };
        let special = [&ends[..both], &around.source_prefix, &around.source_suffix].concat();
        let (source, target) = (vocabulary(TOKENIZER, &special)?, vocabulary(target, &ends)?);
        let mut caches = names(decoder.outputs());
        caches.retain(|name| name.starts_with("present_"));
        let selected = OutputSelector::no_default().with("candidate_ids");
        let selected = caches.iter().fold(selected, |outputs, name| outputs.with(name));
        Ok(Self {
            source,
            target,
            inputs: names(decoder.inputs()),
            outputs: RunOptions::new()?.with_outputs(selected),
            manifest: bundle.manifest,
            encoder,
            decoder,
            caches,
        })
    }

    pub fn generate(&mut self, texts: &[String], batch_size: usize) -> Result<Vec<Answer>, Error> {
        let (around, limit) = (&self.manifest.text, self.manifest.spec.max_source_length);
        let mut sources = Vec::new();
        for text in texts {
            let ids = [&around.source_prefix[..], &self.source.encode(text)?, &around.source_suffix].concat();
            if ids.len() > limit {
                return Err(format!("a text has {} tokens, the limit is {limit}: {text}", ids.len()).into());
            }
            sources.push(ids);
        }
        let mut answers = Vec::new();
        for batch in sources.chunks(batch_size) {
            for token_ids in self.decode(batch)? {
                let is_end = token_ids.last() == Some(&self.manifest.spec.tokens.eos);
                let finish_reason = if is_end { "eos" } else { "length" };
                answers.push(Answer { text: self.target.decode(&token_ids)?, token_ids, finish_reason });
            }
        }
        Ok(answers)
    }

    fn decode(&mut self, sources: &[Vec<u32>]) -> Result<Vec<Vec<u32>>, Error> {
        let mut feeds = self.encode(sources)?;
        let (spec, prefix) = (&self.manifest.spec, &self.manifest.text.target_prefix);
        let (rows, capacity) = (sources.len(), spec.max_target_length);
        let mut written = vec![prefix.clone(); rows];
        let mut ended = vec![false; rows];
        let begin: Vec<i64> = [spec.tokens.start].iter().chain(prefix).map(|&id| id.into()).collect();
        let (mut next, mut past) = (begin.repeat(rows), 0);
        while written.iter().zip(&ended).any(|(ids, is_end)| ids.len() < capacity && !is_end) {
            // The inputs of both variants are made; the graph is given those that it has.
            let count = next.len() / rows;
            let total = past + count;
            let positions: Vec<i64> = (past as i64..total as i64).collect();
            feeds.insert("target_ids".into(), int64(&[rows, count], next)?);
            feeds.insert("positions".into(), int64(&[rows, count], positions.repeat(rows))?);
            feeds.insert("last_position".into(), int32(vec![total as i32 - 1; rows])?);
            feeds.insert("total_length".into(), int32(vec![total as i32])?);
            let inputs = self.inputs.iter().map(|name| (name, SessionInputValue::from(&feeds[name])));
            let mut outputs = self.decoder.run_with_options(inputs.collect::<Vec<_>>(), &self.outputs)?;
            next = outputs["candidate_ids"].try_extract_tensor::<i64>()?.1.to_vec();
            for name in &self.caches {
                let present = outputs.remove(name).expect("it was asked for");
                feeds.insert(name.replace("present_", "past_"), present);
            }
            for (row, &id) in next.iter().enumerate() {
                if written[row].len() < capacity && !ended[row] {
                    written[row].push(id as u32);
                    ended[row] = id as u32 == spec.tokens.eos;
                }
            }
            past = total;
        }
        Ok(written)
    }

    /// Read sources, padded to one length; return what stays the same in each step, and the caches of the first.
    fn encode(&mut self, sources: &[Vec<u32>]) -> Result<Feeds, Error> {
        let spec = &self.manifest.spec;
        let (rows, length) = (sources.len(), sources.iter().map(Vec::len).max().unwrap_or(0));
        let (mut ids, mut mask) = (Vec::new(), Vec::new());
        for source in sources {
            let padded = source.iter().chain(std::iter::repeat(&spec.tokens.pad)).take(length);
            ids.extend(padded.map(|&id| i64::from(id)));
            mask.extend((0..length).map(|place| place < source.len()));
        }
        let mask = Tensor::from_array(([rows, length], mask))?.into_dyn();
        let mut feeds = Feeds::from([("num_candidates".into(), int64(&[1], vec![1])?)]);
        let ids = int64(&[rows, length], ids)?;
        let mut cross = self.encoder.run(ort::inputs!["source_ids" => &ids, "source_mask" => &mask])?;
        // Caches grow with each step, or are as long as the longest target from the beginning.
        let is_fixed = self.inputs.iter().any(|name| name == "positions");
        let places = if is_fixed { spec.max_target_length as i64 } else { 0 };
        for name in cross.keys().map(str::to_owned).collect::<Vec<_>>() {
            let value = cross.remove(&name).expect("it was just listed");
            let tensor = value.downcast_ref::<DynTensorValueType>()?;
            let (heads, width) = (tensor.shape()[1], tensor.shape()[3]);
            let zeros =
                DynTensor::new(&Allocator::default(), *tensor.data_type(), [rows as i64, heads, places, width])?;
            feeds.insert(name.replace("cross_", "past_"), zeros.into_dyn());
            feeds.insert(name, value);
        }
        drop(cross);
        feeds.insert("source_mask".into(), mask);
        Ok(feeds)
    }
}

fn names(outlets: &[Outlet]) -> Vec<String> {
    outlets.iter().map(|one| one.name().to_owned()).collect()
}

fn int64(shape: &[usize], data: Vec<i64>) -> ort::Result<DynValue> {
    Ok(Tensor::from_array((shape, data))?.into_dyn())
}

fn int32(data: Vec<i32>) -> ort::Result<DynValue> {
    Ok(Tensor::from_array(([data.len()], data))?.into_dyn())
}
