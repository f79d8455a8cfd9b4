//! Machines without a daemon.

use std::path::PathBuf;

use super::super::documents::Documents;
use super::*;

fn documents(resident_bytes: u64) -> Documents {
    let document = serde_json::json!({
        "state": "running", "cpus": 1, "memory_bytes": GIB, "backing": "anon",
        "resident_bytes": resident_bytes, "merged_bytes": 100 * MIB, "uptime_ms": 1,
        "clock": { "policy": "continue" }, "kernel": "", "pid": 9,
        "isolation": serde_json::to_value(ebb_vmm::isolation::IsolationInfo::default()).unwrap(),
        "version": "1",
        "balloon": { "target_bytes": 0, "actual_bytes": 0, "state": "idle" },
    });
    let balloon = serde_json::json!({
        "target_bytes": 0, "actual_bytes": 0, "state": "idle", "offered_features": [],
        "negotiated_features": ["page_reporting", "host_requests"],
        "statistics_interval_seconds": 0,
    });
    let mut statistics = serde_json::json!({ "age_ms": 2000, "statistics": {} });
    statistics["statistics"] =
        serde_json::to_value(ebb_vmm::api::StatisticsValues::default()).unwrap();
    statistics["statistics"]["available_memory_bytes"] = (600 * MIB).into();
    statistics["statistics"]["free_memory_bytes"] = (300 * MIB).into();
    Documents {
        at_ms: 100_000,
        vm: serde_json::from_value(document).unwrap(),
        balloon: Some(serde_json::from_value(balloon).unwrap()),
        statistics: Some(serde_json::from_value(statistics).unwrap()),
    }
}

#[test]
fn machines_without_a_daemon() {
    let sockets = ["/run/a.sock", "/run/b.sock"].map(PathBuf::from).to_vec();
    let mut model = Model::new(Source::Monitors(sockets));
    assert!(picture(&model, 100, 20).contains("no answer yet"));
    model.receive(Report::Host(status(0, Vec::new()).host));
    model.receive(Report::Monitor(0, Ok(Box::new(documents(700 * MIB)))));
    model.receive(Report::Monitor(1, Err("no process listens\u{7}".to_owned())));
    // An index that does not exist is ignored.
    model.receive(Report::Monitor(2, Err("x".to_owned())));
    let shown = picture(&model, 100, 30);
    let row = |name: &str| shown.lines().find(|line| line.starts_with(name)).unwrap().to_owned();
    assert!(shown.starts_with("host: 4.0 GiB of 16.0 GiB available, swap"), "{shown}");
    assert!(row("a ").contains("700.0 MiB  424.0 MiB") && row("a ").contains("running"), "{shown}");
    assert!(row("a ").contains("-=."), "{shown}");
    assert!(row("b ").contains("no process"), "{shown}");
    for fact in ["2.0 s ago", "means     reporting, reclaim", "merged    100.0 MiB", "process 9"] {
        assert!(shown.contains(fact), "no {fact:?}: {shown}");
    }
    for absent in ["decision", "DECISION", "profile", "h hold"] {
        assert!(!shown.contains(absent), "{absent:?}: {shown}");
    }
    // A question comes first.
    let socket = PathBuf::from("/run/a.sock");
    for (key, act) in [("p", Act::Park(socket.clone())), ("r", Act::Reclaim(socket))] {
        for no in [KeyCode::Char('n'), KeyCode::Char('q'), KeyCode::Esc] {
            assert_eq!(typed(&mut model, key), Effect::None);
            assert!(picture(&model, 80, 20).contains(&format!("{act}? y/n")));
            // Other keys are no answer.
            assert_eq!(typed(&mut model, "s"), Effect::None);
            assert_eq!(model.mode, Mode::Question(act.clone()));
            assert_eq!(press(&mut model, no), Effect::None);
            assert_eq!(model.mode, Mode::List);
        }
        typed(&mut model, key);
        assert_eq!(typed(&mut model, "y"), Effect::Act(act));
    }
    assert_eq!(typed(&mut model, "h"), Effect::None);
    assert!(picture(&model, 80, 20).contains("there is no daemon"));
    // A monitor that goes away is shown as such, with what was last known.
    model.receive(Report::Monitor(0, Err("it did not answer".to_owned())));
    let shown = picture(&model, 100, 30);
    assert!(shown.contains("it did not") && shown.contains("700.0 MiB"), "{shown}");
    model.receive(Report::Monitor(0, Ok(Box::new(documents(MIB)))));
    assert!(!picture(&model, 100, 30).contains("it did not"));
}
