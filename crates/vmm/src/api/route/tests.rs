//! Valid requests and refusals.

use super::super::reply::Persistence;
use super::*;
use crate::api::balloon::{BalloonTarget, StatisticsInterval};
use crate::api::disks::DiskResize;
use crate::api::free_pages::{FreePagesRequest, ReclaimRequest};
use crate::api::lease::PauseRequest;
use crate::api::limits::{LimitsChange, RateLimits};
use crate::api::merge::MergeRun;
use crate::api::migration::{AtTimeLimit, FreePageChoice, MigrationRequest};
use crate::api::net::{LinkState, NetChange};
use crate::api::vm::SnapshotTarget;

fn ask(method: &str, target: &str, body: &str) -> Result<Operation, Problem> {
    let (path, query) = match target.split_once('?') {
        Some((path, query)) => (path, Some(query)),
        None => (target, None),
    };
    let persistence = Persistence::KeepAlive;
    route(&Request { method, path, query, body: body.as_bytes(), persistence })
}

fn refused(method: &str, target: &str, body: &str) -> (u16, String) {
    let problem = ask(method, target, body).unwrap_err();
    (problem.status.code(), problem.detail.message)
}

#[test]
fn finds_every_operation() {
    let free_pages =
        |min_order, timeout_ms| Operation::FreePages(FreePagesRequest { min_order, timeout_ms });
    let reclaim =
        |min_order, timeout_ms| Operation::Reclaim(ReclaimRequest { min_order, timeout_ms });
    let interval = |interval_seconds| {
        Operation::SetStatisticsInterval(StatisticsInterval { interval_seconds })
    };
    for (method, target, body, operation) in [
        ("GET", "/openapi.json", "", Operation::OpenApi),
        ("GET", "/vm", "", Operation::VmInfo),
        ("PUT", "/vm/pause", "", Operation::Pause(PauseRequest { lease_ms: None })),
        (
            "PUT",
            "/vm/pause",
            r#"{"lease_ms": 2000}"#,
            Operation::Pause(PauseRequest { lease_ms: Some(2000) }),
        ),
        ("PUT", "/vm/resume", "{}", Operation::Resume),
        ("PUT", "/vm/power-button", " { } ", Operation::PowerButton),
        ("PUT", "/vm/trim", "", Operation::Trim),
        (
            "PUT",
            "/vm/snapshot",
            r#"{"path": "/a b/c"}"#,
            Operation::Snapshot(SnapshotTarget { path: "/a b/c".into() }),
        ),
        ("GET", "/vm/working-set", "", Operation::WorkingSet),
        ("PUT", "/vm/kill", "\n", Operation::Kill),
        ("GET", "/disks", "", Operation::Disks),
        (
            "PUT",
            "/disks",
            r#"{"device": "disk1", "size_bytes": 4096}"#,
            Operation::ResizeDisk(DiskResize {
                device: "disk1".to_owned(),
                size_bytes: Some(4096),
                path: None,
            }),
        ),
        ("GET", "/limits", "", Operation::Limits),
        (
            "PUT",
            "/limits",
            r#"{"device": "disk0", "bandwidth": 7, "ops_burst": 0}"#,
            Operation::SetLimits(LimitsChange {
                device: "disk0".to_owned(),
                limits: RateLimits {
                    bandwidth: Some(7),
                    ops_burst: Some(0),
                    ..RateLimits::default()
                },
            }),
        ),
        ("GET", "/net", "", Operation::Net),
        (
            "PUT",
            "/net",
            r#"{"device": "net0", "link": "down"}"#,
            Operation::SetNet(NetChange { device: "net0".to_owned(), link: LinkState::Down }),
        ),
        ("GET", "/merge", "", Operation::Merge),
        (
            "PUT",
            "/merge",
            r#"{"run": "unmerge", "merge_across_nodes": false, "cpu_percent": 7}"#,
            Operation::SetMerge(Box::new(MergeSettings {
                run: Some(MergeRun::Unmerge),
                merge_across_nodes: Some(false),
                cpu_percent: Some(7),
                ..MergeSettings::default()
            })),
        ),
        ("GET", "/vm/migration", "", Operation::Migration { wait: None }),
        (
            "GET",
            "/vm/migration?wait_ms=70000",
            "",
            Operation::Migration { wait: Some(Duration::from_secs(10)) },
        ),
        ("PUT", "/vm/migration/cancel", "", Operation::CancelMigration),
        ("GET", "/balloon", "", Operation::Balloon),
        (
            "PUT",
            "/balloon",
            r#"{"target_bytes": 4096}"#,
            Operation::SetBalloon(BalloonTarget { target_bytes: 4096, lease_ms: None }),
        ),
        ("GET", "/balloon/statistics", "", Operation::Statistics { max_age: None }),
        (
            "GET",
            "/balloon/statistics?max_age_ms=1500",
            "",
            Operation::Statistics { max_age: Some(Duration::from_millis(1500)) },
        ),
        ("PUT", "/balloon/statistics-interval", r#"{"interval_seconds": 5}"#, interval(5)),
        ("PUT", "/balloon/statistics-interval", r#"{"interval_seconds": 0}"#, interval(0)),
        ("PUT", "/balloon/free-pages", "", free_pages(0, 5000)),
        ("PUT", "/balloon/free-pages", "{}", free_pages(0, 5000)),
        (
            "PUT",
            "/balloon/free-pages",
            r#"{"min_order": 18, "timeout_ms": 60000}"#,
            free_pages(18, 60_000),
        ),
        ("PUT", "/balloon/reclaim", "", reclaim(9, 5000)),
        ("PUT", "/balloon/reclaim", r#"{"min_order": 0, "timeout_ms": 1}"#, reclaim(0, 1)),
        ("GET", "/metrics", "", Operation::Metrics),
    ] {
        assert_eq!(ask(method, target, body), Ok(operation), "{method} {target}");
    }
}

#[test]
fn paths_are_exact_and_allowed_methods_are_named() {
    for path in ["", "/", "/VM", "/vm/", "//vm", "/vm/nope", "*", "/%76m"] {
        assert_eq!(refused("GET", path, "").0, 404, "{path}");
    }
    for (method, path, allow) in [
        ("POST", "/vm", "GET"),
        ("get", "/vm", "GET"),
        ("HEAD", "/balloon", "GET, PUT"),
        ("GET", "/vm/pause", "PUT"),
    ] {
        let problem = ask(method, path, "").unwrap_err();
        assert_eq!(problem.status, Status::MethodNotAllowed, "{method} {path}");
        assert_eq!(problem.allow.as_deref(), Some(allow), "{method} {path}");
    }
}

#[test]
fn bad_bodies_are_refused_with_the_reason() {
    for (body, status, part) in [
        ("", 400, "needs a JSON object"),
        ("{", 400, "not JSON"),
        ("{\"target_bytes\": 4096} x", 400, "not JSON"),
        ("\u{0}", 400, "not JSON"),
        ("[1]", 422, "not a JSON object"),
        ("{}", 422, "'target_bytes' is missing"),
        (r#"{"target": 1}"#, 422, "unknown field 'target'"),
        (r#"{"target_bytes": 1, "actual": 2}"#, 422, "unknown field 'actual'"),
        (r#"{"target_bytes": 1, "target_bytes": 2}"#, 422, "twice"),
        (r#"{"target_bytes": "4G"}"#, 422, "'target_bytes' is the string \"4G\""),
        (r#"{"target_bytes": -1}"#, 422, "-1, which is out of range"),
        (r#"{"target_bytes": 1.5}"#, 422, "1.5"),
        (r#"{"target_bytes": 18446744073709551616}"#, 422, "target_bytes"),
        (r#"{"target_bytes": null}"#, 422, "is null"),
        (r#"{"target_bytes": true}"#, 422, "is true"),
        (r#"{"target_bytes": [4096]}"#, 422, "an array"),
        (r#"{"target_bytes": {}}"#, 422, "an object"),
    ] {
        let (code, message) = refused("PUT", "/balloon", body);
        assert_eq!(code, status, "{body}: {message}");
        assert!(message.contains(part), "{body}: {message}");
    }
    let (code, message) =
        refused("PUT", "/balloon/statistics-interval", r#"{"interval_seconds": 86401}"#);
    assert_eq!(code, 422);
    assert!(message.contains("86401"), "{message}");
    assert_eq!(refused("PUT", "/vm/pause", r#"{"force": true}"#).0, 422);
    assert_eq!(refused("GET", "/balloon", r#"{"target_bytes": 4096}"#).0, 400);
    for path in ["1", "null", "\"\"", "\"vm.snapshot\"", "\"./x\"", "\"/a\\u0000b\""] {
        let (code, message) = refused("PUT", "/vm/snapshot", &format!("{{\"path\": {path}}}"));
        assert_eq!(code, 422, "{path}: {message}");
    }
    assert_eq!(refused("PUT", "/vm/snapshot", "").0, 400);
    for (body, part) in [
        (r#"{"min_order": 19}"#, "from 0 to 18"),
        (r#"{"min_order": -1}"#, "from 0 to 18"),
        (r#"{"min_order": "9"}"#, "from 0 to 18"),
        (r#"{"timeout_ms": 0}"#, "from 1 to 60000"),
        (r#"{"timeout_ms": 60001}"#, "from 1 to 60000"),
        (r#"{"order": 9}"#, "min_order"),
    ] {
        let problem = ask("PUT", "/balloon/free-pages", body).unwrap_err();
        assert_eq!(problem.status, Status::UnprocessableContent, "{body}");
        assert!(problem.detail.remedy.unwrap().contains(part), "{body}");
    }
    for (body, part) in [
        (r#"{"run": "maybe"}"#, "stop, merge, unmerge"),
        (r#"{"merge_across_nodes": 1}"#, "true or false"),
        (r#"{"max_page_sharing": 1}"#, "from 2"),
        (r#"{"cpu_percent": 101}"#, "from 1 to 100"),
        (r#"{"target_scan_seconds": 0}"#, "from 1 to 86400"),
        (r#"{"pages_per_second": 5, "target_scan_seconds": 5}"#, "one of them"),
        ("{}", "run, merge_across_nodes"),
        (r#"{"pages_to_scan": 5}"#, "pages_per_second"),
    ] {
        let problem = ask("PUT", "/merge", body).unwrap_err();
        assert_eq!(problem.status, Status::UnprocessableContent, "{body}");
        assert!(problem.detail.remedy.unwrap().contains(part), "{body}");
    }
    let deep = "[".repeat(10_000);
    assert_eq!(refused("PUT", "/balloon", &format!("{{\"target_bytes\": {deep}")).0, 400);
}

#[test]
fn bad_queries_are_refused_with_the_reason() {
    for (target, part) in [
        ("/vm?x", "'x'"),
        ("/balloon/statistics?max_age=5", "'max_age'"),
        ("/balloon/statistics?max_age_ms=-5", "'-5'"),
        ("/balloon/statistics?max_age_ms=", "''"),
        ("/balloon/statistics?max_age_ms=1&max_age_ms=2", "twice"),
    ] {
        let (code, message) = refused("GET", target, "");
        assert_eq!(code, 400, "{target}");
        assert!(message.contains(part), "{target}: {message}");
    }
    assert_eq!(ask("GET", "/vm?", ""), Ok(Operation::VmInfo));
}

#[test]
fn a_migration_has_defaults_and_every_field_can_be_set() {
    let plain = MigrationRequest::new("tcp:127.0.0.1:4000");
    let asked = |body: &str| ask("PUT", "/vm/migrate", body);
    let migrate = |request: MigrationRequest| Ok(Operation::Migrate(Box::new(request)));
    assert_eq!(asked(r#"{"to": "tcp:127.0.0.1:4000"}"#), migrate(plain.clone()));
    let full = MigrationRequest {
        streams: 16,
        downtime_ms: 1,
        bandwidth_bytes_per_s: Some(1 << 30),
        timeout_seconds: Some(60),
        on_timeout: AtTimeLimit::Force,
        auto_converge: true,
        free_pages: FreePageChoice::Query,
        zero_pages: false,
        holes: false,
        tls_name: Some("receiver.example".to_owned()),
        insecure: true,
        share_memory: true,
        ..plain.clone()
    };
    let body = serde_json::to_string(&full).unwrap();
    assert_eq!(asked(&body), migrate(full));
}

#[test]
fn a_wrong_migration_names_its_field() {
    for (body, field) in [
        ("{}", "to"),
        (r#"{"to": 3}"#, "to"),
        (r#"{"to": ""}"#, "to"),
        (r#"{"to": "unix:/x", "streams": 17}"#, "streams"),
        (r#"{"to": "unix:/x", "streams": 0}"#, "streams"),
        (r#"{"to": "unix:/x", "bandwidth_bytes_per_s": 1}"#, "bandwidth_bytes_per_s"),
        (r#"{"to": "unix:/x", "on_timeout": "stop"}"#, "on_timeout"),
        (r#"{"to": "unix:/x", "free_pages": true}"#, "free_pages"),
        (r#"{"to": "unix:/x", "holes": "on"}"#, "holes"),
        // Files come as descriptors.
        (r#"{"to": "unix:/x", "tls_ca": "/a"}"#, "tls_ca"),
        (r#"{"to": "unix:/x", "speed": 1}"#, "speed"),
    ] {
        let problem = ask("PUT", "/vm/migrate", body).unwrap_err();
        assert_eq!(
            (problem.status, problem.detail.field.as_deref()),
            (Status::UnprocessableContent, Some(field))
        );
        assert!(
            problem.detail.message.contains(field) && problem.detail.remedy.is_some(),
            "{problem:?}"
        );
    }
}
