use std::collections::BTreeMap;

use ebb_host_policy::report::MachineStatus;
use ebb_host_policy::{
    Balloon, Cause, GIB, Host, Machine, Means, Pressure, Settings, Statistics, Swap,
};
use proptest::prelude::*;

use super::*;

/// A machine of which everything is known.
fn machine(name: &str) -> MachineStatus {
    let number = Some(7 * GIB);
    let machine = Machine {
        name: name.to_owned(),
        size_bytes: 8 * GIB,
        resident_bytes: number,
        swapped_bytes: number,
        processor_ms: number,
        is_paused: false,
        balloon: Some(Balloon { target_bytes: GIB, actual_bytes: GIB }),
        statistics: Some(Statistics {
            taken_ms: 1,
            total_bytes: number,
            available_bytes: number,
            free_bytes: number,
            caches_bytes: number,
            major_faults: number,
            swap_out_bytes: number,
            oom_kills: number,
        }),
        means: Means::default(),
    };
    MachineStatus {
        name: name.to_owned(),
        machine: Some(machine),
        monitor: Some("qemu".to_owned()),
        socket: format!("/run/{name}.sock"),
        pid: Some(1),
        profile: "default".to_owned(),
        is_held: false,
        trouble: None,
        explanation: None,
    }
}

fn observed(names: &[&str]) -> Observed {
    let status = Status {
        version: "1".to_owned(),
        at_ms: 5,
        level: Level::Tight,
        cause: Cause::Swapped { out_bytes: 1 },
        since_ms: 1,
        host: Host {
            total_bytes: 16 * GIB,
            available_bytes: 4 * GIB,
            swap: Some(Swap { total_bytes: GIB, used_bytes: 1, out_bytes: 2 }),
            pressure: Some(Pressure { some_us: 1_500_000, full_us: 7 }),
        },
        machines: names.iter().map(|name| machine(name)).collect(),
        problems: vec!["one".to_owned()],
    };
    let mut counters = Counters::default();
    counters.decided();
    for name in names {
        counters.ordered(name, Action::Park);
    }
    Observed::new(status, counters, Counts::default(), &Settings::default())
}

/// Series of a text: names with labels, and values.
type Series = BTreeMap<(String, BTreeMap<String, String>), String>;

/// Reads the format, and fails where the text is not in it.
fn parse(text: &str) -> Result<Series, String> {
    let mut series = Series::new();
    let mut described = BTreeSet::new();
    let mut current = String::new();
    assert!(text.ends_with('\n'));
    for line in text.lines() {
        if let Some(help) = line.strip_prefix("# HELP ") {
            let (name, help) = help.split_once(' ').ok_or("no help")?;
            assert!(!help.is_empty() && !help.contains('\\'), "{line}");
            // All series of a metric are together.
            assert!(described.insert(name.to_owned()), "{name} is there twice");
            name.clone_into(&mut current);
        } else if let Some(kind) = line.strip_prefix("# TYPE ") {
            let is_counter = current.ends_with("_total");
            let expected = format!("{current} {}", if is_counter { "counter" } else { "gauge" });
            assert_eq!(kind, expected);
        } else {
            let (name, labels, value) = sample(line)?;
            assert_eq!(name, current);
            let number: f64 = value.parse().map_err(|_| format!("{line}: no number"))?;
            assert!(number.is_finite() && number >= 0.0, "{line}");
            assert!(series.insert((name, labels), value).is_none(), "{line} is there twice");
        }
    }
    Ok(series)
}

fn sample(line: &str) -> Result<(String, BTreeMap<String, String>, String), String> {
    let problem = || format!("no sample: {line}");
    let end = line.find(['{', ' ']).ok_or_else(problem)?;
    let (name, rest) = line.split_at(end);
    let Some(rest) = rest.strip_prefix('{') else {
        return Ok((name.to_owned(), BTreeMap::new(), rest[1..].to_owned()));
    };
    let (mut labels, mut characters) = (BTreeMap::new(), rest.chars());
    loop {
        let label: String = characters.by_ref().take_while(|it| *it != '=').collect();
        assert!(label.bytes().all(|byte| byte == b'_' || byte.is_ascii_lowercase()), "{line}");
        assert_eq!(characters.next(), Some('"'), "{line}");
        let mut value = String::new();
        loop {
            match characters.next().ok_or_else(problem)? {
                '"' => break,
                '\\' => match characters.next().ok_or_else(problem)? {
                    'n' => value.push('\n'),
                    escaped @ ('\\' | '"') => value.push(escaped),
                    other => return Err(format!("\\{other} in {line}")),
                },
                other => value.push(other),
            }
        }
        assert!(labels.insert(label, value).is_none(), "{line}");
        match characters.next().ok_or_else(problem)? {
            ',' => {}
            '}' => break,
            other => return Err(format!("{other} in {line}")),
        }
    }
    let value = characters.as_str().strip_prefix(' ').ok_or_else(problem)?;
    Ok((name.to_owned(), labels, value.to_owned()))
}

fn value<'a>(series: &'a Series, name: &str, labels: &[(&str, &str)]) -> &'a str {
    let labels = labels.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
    &series[&(name.to_owned(), labels.collect())]
}

#[test]
fn a_host_with_a_machine() {
    let series = parse(&render(&observed(&["web-1"]))).unwrap();
    assert_eq!(value(&series, "ebbd_host_available_bytes", &[]), "4294967296");
    assert_eq!(value(&series, "ebbd_host_memory_waiting_seconds_total", &[]), "1.500000");
    assert_eq!(value(&series, "ebbd_host_level", &[("level", "tight")]), "1");
    assert_eq!(value(&series, "ebbd_host_level", &[("level", "plenty")]), "0");
    let web = [("machine", "web-1"), ("monitor", "qemu"), ("profile", "default")];
    assert_eq!(value(&series, "ebbd_machine_resident_bytes", &web), "7516192768");
    assert_eq!(value(&series, "ebbd_machine_up", &web), "1");
    let park = [&web[..], &[("action", "park")]].concat();
    assert_eq!(value(&series, "ebbd_machine_orders_total", &park), "1");
}

#[test]
fn what_is_not_known_is_left_out() {
    let mut observed = observed(&["a"]);
    observed.status.host.swap = None;
    observed.status.host.pressure = None;
    observed.status.machines[0].machine = None;
    let text = render(&observed);
    parse(&text).unwrap();
    for name in ["waiting_seconds", "swapped_out", "machine_resident"] {
        assert!(!text.contains(name), "{name}");
    }
    assert!(text.contains("ebbd_machine_up"));
}

#[test]
fn machines_that_have_gone_are_forgotten() {
    let mut counters = Counters::default();
    counters.ordered("a", Action::Trim);
    counters.ordered("b", Action::Trim);
    counters.keep_only(&BTreeSet::from(["b"]));
    assert_eq!(counters.by_machine.keys().collect::<Vec<_>>(), ["b"]);
    assert_eq!(counters.orders.iter().sum::<u64>(), 2);
}

proptest! {
    /// Names of files can be any text, and the same twice.
    #[test]
    fn any_names_are_escaped(names in prop::collection::vec("\\PC*|[\\\\\"\n{},= ]*", 0..6)) {
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let series = parse(&render(&observed(&names))).unwrap();
        let found = series.keys().filter(|(name, _)| name == "ebbd_machine_up");
        let found: BTreeSet<&str> = found.map(|(_, labels)| labels["machine"].as_str()).collect();
        prop_assert_eq!(found, names.into_iter().collect());
    }
}

/// Each expression of the dashboard uses series that are there, and each metric is in it.
#[test]
fn the_dashboard_fits_the_metrics() {
    let text = include_str!("../../dashboard.json");
    let dashboard: serde_json::Value = serde_json::from_str(text).unwrap();
    let mut expressions = Vec::new();
    for panel in dashboard["panels"].as_array().unwrap() {
        for target in panel["targets"].as_array().into_iter().flatten() {
            assert_eq!(target["datasource"]["uid"], "${datasource}", "{panel}");
            expressions.push(target["expr"].as_str().unwrap().to_owned());
        }
    }
    let variables = dashboard["templating"]["list"].as_array().unwrap();
    let names = variables.iter().map(|variable| variable["name"].as_str().unwrap());
    assert_eq!(names.collect::<Vec<_>>(), ["datasource", "machine"]);
    expressions.push(variables[1]["query"]["query"].as_str().unwrap().to_owned());
    let series = parse(&render(&observed(&["a"]))).unwrap();
    let mut labels: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for (name, found) in series.keys() {
        labels.entry(name).or_default().extend(found.keys().map(String::as_str));
    }
    let is_word = |character: char| character == '_' || character.is_ascii_alphanumeric();
    let mut used = BTreeSet::new();
    for expression in &expressions {
        let mut rest = expression.as_str();
        while let Some(start) = rest.find("ebbd_") {
            let tail = &rest[start..];
            let end = tail.find(|character| !is_word(character)).unwrap_or(tail.len());
            let (name, after) = tail.split_at(end);
            let known = labels.get(name).unwrap_or_else(|| panic!("{expression}: no {name}"));
            used.insert(name.to_owned());
            if let Some(selector) = after.strip_prefix('{') {
                let (selector, _) = selector.split_once('}').unwrap();
                for part in selector.split(',') {
                    let label = part.split(['=', '!']).next().unwrap();
                    assert!(known.contains(label), "{expression}: {name} has no {label}");
                }
            }
            rest = after;
        }
    }
    // What is for alerts and searches more than for pictures.
    let exceptions = ["ebbd_build_info", "ebbd_decisions_total", "ebbd_host_swap_bytes"];
    let left: Vec<_> = labels.keys().filter(|name| !used.contains(**name)).copied().collect();
    assert_eq!(left, exceptions);
}
