//! Answers texts with a bundle of tfexport: generate BUNDLE [TEXT…]; without TEXT, each line of standard input.

mod bundle;
mod model;
mod vocabulary;

use std::{env, io, process::ExitCode, time::Instant};

use bundle::Bundle;
use model::Model;

type Error = Box<dyn std::error::Error + Send + Sync>;

const USAGE: &str = "usage: generate BUNDLE [--json] [--time] [--batch-size 32] [--threads 1] [TEXT…]";

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Error> {
    let (mut json, mut time, mut batch_size, mut threads) = (false, false, 32, 1);
    let mut given = Vec::new();
    let mut arguments = env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let mut number = || arguments.next().and_then(|word| word.parse().ok()).filter(|&n| n > 0).ok_or(USAGE);
        match argument.as_str() {
            "--json" => json = true, // one object a line: text, token_ids, finish_reason
            "--time" => time = true, // say on standard error how long decoding took
            "--batch-size" => batch_size = number()?,
            "--threads" => threads = number()?, // more are faster where a step reads many megabytes of weights
            option if option.starts_with("--") => return Err(USAGE.into()),
            _ => given.push(argument),
        }
    }
    if given.is_empty() {
        return Err(USAGE.into());
    }
    let folder = given.remove(0);
    if given.is_empty() {
        given = io::stdin().lines().collect::<Result<_, _>>()?;
    }
    let library = env::var("ORT_DYLIB_PATH").map_err(|_| "set ORT_DYLIB_PATH to the library of ONNX Runtime")?;
    ort::init_from(library)?.commit();
    let mut model = Model::load(Bundle::open(folder.into())?, threads)?;
    let start = Instant::now();
    let answers = model.generate(&given, batch_size)?;
    let seconds = start.elapsed().as_secs_f64();
    for answer in &answers {
        println!("{}", if json { serde_json::to_string(answer)? } else { answer.text.replace('\n', " ") });
    }
    if time {
        let tokens: usize = answers.iter().map(|answer| answer.token_ids.len()).sum();
        eprintln!("{} texts, {tokens} tokens, {seconds:.3} s", given.len());
    }
    Ok(())
}
