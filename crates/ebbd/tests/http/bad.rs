//! Servers that answer badly.

use std::path::Path;

use ebb_host_policy::Action;
use ebbd::monitors::{Kind, Seen, Trouble};

use crate::server::{Server, sections};
use crate::{NOW_MS, PAUSE, SOME, act, inflate};

/// The documents of a machine, by target.
fn documents(kind: Kind) -> Vec<(&'static str, String)> {
    let (name, section, prefix) = match kind {
        Kind::Firecracker => ("firecracker/plugged.http", "plugged", "GET "),
        _ => ("cloud-hypervisor/machine.http", "inflated", "GET "),
    };
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name);
    let sections = sections(&std::fs::read_to_string(path).unwrap());
    let mut found = Vec::new();
    for target in ["/", "/machine-config", "/hotplug/memory", "/balloon", "/balloon/statistics"]
        .into_iter()
        .chain(["/api/v1/vm.info"])
    {
        if let Some(answer) = sections[section].get(&format!("{prefix}{target}")) {
            found.push((target, answer.split_once("\r\n\r\n").unwrap().1.to_owned()));
        }
    }
    found
}

/// What a look finds if one of a machine's documents is changed, for each of them.
async fn with_one_changed(
    change: impl Fn(&str) -> String,
) -> Vec<(&'static str, Result<Seen, Trouble>)> {
    let mut tasks = Vec::new();
    for (kind, name) in
        [(Kind::Firecracker, "Firecracker API"), (Kind::CloudHypervisor, "Cloud Hypervisor API")]
    {
        let documents = documents(kind);
        for index in 0..documents.len() {
            let mut documents = documents.clone();
            documents[index].1 = change(&documents[index].1);
            let target = documents[index].0;
            let result = tokio::spawn(async move { exercise(name, &documents).await });
            tasks.push((target, result));
        }
    }
    let mut results = Vec::new();
    for (target, result) in tasks {
        results.push((target, result.await.unwrap()));
    }
    results
}

/// Looks at a machine with these documents, and does things to it, which must end.
async fn exercise(
    name: &'static str,
    documents: &[(&'static str, String)],
) -> Result<Seen, Trouble> {
    let server = Server::canned(name, documents);
    let mut monitor = server.connect().await?;
    let seen = monitor.look(NOW_MS, 2000).await;
    for action in [inflate(SOME), PAUSE, Action::Resume] {
        let _ = act(&mut monitor, action).await;
    }
    seen
}

#[tokio::test]
async fn garbage_is_nonsense() {
    for garbage in ["", "\u{1b}[31m", "{}", "[]", "null", "7", "{\"state\":7}", "[[[["] {
        for (target, result) in with_one_changed(|_| garbage.to_owned()).await {
            // All that is used of this document may be absent.
            let is_document = target == "/balloon" && garbage.starts_with(['{', '[']);
            let is_nonsense = matches!(result, Err(Trouble::Nonsense(_)));
            assert!(is_document || is_nonsense, "{target} {garbage} {result:?}");
        }
    }
    let halved = with_one_changed(|document| document[..document.len() / 2].to_owned()).await;
    for (target, result) in halved {
        assert!(matches!(result, Err(Trouble::Nonsense(_))), "{target} {result:?}");
    }
}

#[tokio::test]
async fn absurd_numbers_do_no_harm() {
    for number in ["18446744073709551615", "-1", "1e300", "0", "18446744073709551616"] {
        let mut seen = 0;
        for (_, result) in with_one_changed(|document| replace_numbers(document, number)).await {
            seen += u32::from(result.is_ok());
            assert!(matches!(result, Ok(_) | Err(Trouble::Nonsense(_))), "{number} {result:?}");
        }
        assert!(seen > 0, "{number}");
    }
}

/// The document with all numbers that are values replaced.
fn replace_numbers(document: &str, number: &str) -> String {
    let mut result = String::new();
    for piece in document.split_inclusive(':') {
        let rest = piece.trim_start_matches(|character: char| character.is_ascii_digit());
        if rest.len() < piece.len() && result.ends_with("\":") {
            result += number;
        }
        result += rest;
    }
    result
}

#[tokio::test]
async fn an_answer_without_end_is_bounded() {
    let endless = format!("[{}", "0,".repeat(1 << 19));
    for (target, result) in with_one_changed(|_| endless.clone()).await {
        assert!(matches!(result, Err(Trouble::Nonsense(_))), "{target} {result:?}");
    }
}
