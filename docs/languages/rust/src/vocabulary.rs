//! One tokenizer.json, read by the library that tfexport uses itself.

use std::collections::HashSet;

use serde_json::Value;
use tokenizers::Tokenizer;

use crate::Error;

/// A token of this name is the first of those that split texts and that the model has no id for.
const BEYOND: &str = " beyond the model's vocabulary";

/// Text never becomes a special token: it is read as its characters, or as unknown.
pub struct Vocabulary {
    tokenizer: Tokenizer,
    special: HashSet<u32>,
    unknown: Option<u32>,
    beyond: u32,
}

impl Vocabulary {
    /// Read a file; `special` are ids that no text becomes or shows, besides those that the file marks.
    pub fn parse(bytes: &[u8], unknown: Option<u32>, special: &[u32]) -> Result<Self, Error> {
        let mut tokenizer = Tokenizer::from_bytes(bytes)?;
        tokenizer.with_padding(None).with_truncation(None)?;
        tokenizer.set_encode_special_tokens(true);
        let model = serde_json::from_slice::<Value>(bytes)?["model"].take();
        let own = match model["unk_token"].as_str() {
            Some(token) => tokenizer.token_to_id(token),
            None => model["unk_id"].as_u64().map(|id| id as u32),
        };
        let unknown = own.or(unknown);
        let added = tokenizer.get_added_tokens_decoder();
        let marked = added.iter().filter(|(_, token)| token.special).map(|(id, _)| id);
        let special = marked.chain(special).copied().filter(|id| Some(*id) != unknown).collect();
        let beyond = tokenizer.token_to_id(BEYOND).unwrap_or(u32::MAX);
        Ok(Self { tokenizer, special, unknown, beyond })
    }

    pub fn encode(&self, text: &str) -> Result<Vec<u32>, Error> {
        if text.trim().is_empty() {
            return Err("a text is empty; leave it out".into());
        }
        let encoding = self.tokenizer.encode(text, true)?;
        let mut is_known = false;
        let mut ids = encoding.get_ids().to_vec();
        for (id, is_around) in ids.iter_mut().zip(encoding.get_special_tokens_mask()) {
            if *is_around == 0 {
                if self.special.contains(id) || *id >= self.beyond {
                    *id = self.unknown.ok_or_else(|| format!("a text has a special token in it: {text}"))?;
                }
                is_known |= Some(*id) != self.unknown;
            }
        }
        if is_known { Ok(ids) } else { Err(format!("the vocabulary knows no character of: {text}").into()) }
    }

    pub fn decode(&self, ids: &[u32]) -> Result<String, Error> {
        let shown: Vec<u32> = ids.iter().copied().filter(|id| !self.special.contains(id)).collect();
        self.tokenizer.decode(&shown, true)
    }
}
