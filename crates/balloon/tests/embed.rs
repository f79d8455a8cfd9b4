//! Checks the output of the example that embeds the device.

#![allow(clippy::unwrap_used, reason = "tests")]

#[path = "../examples/embed.rs"]
#[allow(dead_code, reason = "its main function")]
mod embed;

#[test]
fn a_monitor_of_another_kind_gets_memory_back() {
    let mut out = Vec::new();
    embed::run(&mut out).unwrap();
    let text = String::from_utf8(out).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 4, "{text}");
    let resident = |line: &str| -> u64 {
        let (_, found) = line.split_once(": ").unwrap();
        found.strip_suffix(" MiB resident").unwrap().parse().unwrap()
    };
    assert_eq!([0, 1, 2].map(|line| resident(lines[line])), [64, 48, 40], "{text}");
    assert!(lines[3].starts_with("24 MiB came back in "), "{text}");
}
