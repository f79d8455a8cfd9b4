//! `ebb ctl` against the real API server, on the test double of a machine from the server's own
//! tests.

use std::sync::Arc;

use clap::Parser;
use double::{MEMORY_BYTES, Mood, TestVm};
use ebb_vmm::api::ApiServer;
use serde_json::{Value, json};

use super::*;

#[path = "../../../vmm/tests/api/double.rs"]
#[allow(dead_code)]
mod double;

#[derive(Debug, Parser)]
struct Cli {
    #[command(flatten)]
    args: Args,
}

struct Machine {
    vm: Arc<TestVm>,
    _server: ApiServer,
    folder: tempfile::TempDir,
}

fn machine(mood: Mood) -> Machine {
    let folder = tempfile::tempdir().unwrap();
    let vm = Arc::new(TestVm::new(mood));
    let server = ApiServer::start(&folder.path().join("vm.sock"), vm.clone()).unwrap();
    Machine { vm, _server: server, folder }
}

fn parse(socket: &str, words: &str) -> Result<Args, clap::Error> {
    Cli::try_parse_from(["ctl", socket].into_iter().chain(words.split_whitespace()))
        .map(|cli| cli.args)
}

impl Machine {
    fn try_ctl(&self, words: &str) -> anyhow::Result<String> {
        let socket = self.folder.path().join("vm.sock");
        let args = parse(socket.to_str().unwrap(), words)?;
        let mut out = Vec::new();
        execute(args, &mut out).map(|()| String::from_utf8(out).unwrap())
    }

    fn ctl(&self, words: &str) -> String {
        self.try_ctl(words).unwrap()
    }

    fn json(&self, words: &str) -> Value {
        serde_json::from_str(&self.ctl(&format!("{words} --json"))).unwrap()
    }

    fn error(&self, words: &str) -> String {
        format!("{:#}", self.try_ctl(words).unwrap_err())
    }
}

fn value<'a>(table: &'a str, what: &str) -> &'a str {
    let line = table.lines().find(|line| line.starts_with(&format!("{what}  ")));
    line.unwrap_or_else(|| panic!("no '{what}' in\n{table}"))[what.len()..].trim()
}

#[test]
fn the_machine_is_shown_and_changed() {
    let machine = machine(Mood::Willing);
    let table = machine.ctl("vm");
    assert_eq!(value(&table, "state"), "running");
    assert_eq!(value(&table, "memory"), "4.0 GiB, anonymous");
    assert_eq!(value(&table, "resident memory"), "123.0 MiB");
    assert_eq!(value(&table, "uptime"), "1.2 s");
    assert_eq!(value(&machine.ctl("pause"), "state"), "paused");
    assert_eq!(machine.json("vm")["state"], "paused");
    assert_eq!(machine.json("resume")["state"], "running");
    machine.ctl("power-button");
    assert_eq!(value(&machine.ctl("kill"), "state"), "stopping");
    assert_eq!(machine.vm.state().kills, 1);
}

#[test]
fn the_balloon_accepts_sizes_with_units() {
    let machine = machine(Mood::Willing);
    let table = machine.ctl("balloon set 1536M");
    assert_eq!(machine.vm.state().target_bytes, 1536 << 20);
    assert_eq!(value(&table, "target"), "1.5 GiB");
    assert_eq!(value(&table, "state"), "inflating");
    assert_eq!(value(&table, "negotiated"), "statistics, deflate on OOM, page reporting");
    assert_eq!(value(&table, "memory is kept"), "a migration is coming in");
    assert_eq!(machine.ctl("balloon"), machine.ctl("balloon show"));
    assert_eq!(machine.json("balloon set 0")["target_bytes"], 0);
    for (text, part) in [("1.5G", "1536M"), ("4GB", "'4G'"), ("much", "'much'"), ("", "required")] {
        let error = machine.error(&format!("balloon set {text}"));
        assert!(error.contains(part), "{error}");
    }
    let error = machine.error("balloon set 5G");
    assert!(error.contains(&format!("at most {MEMORY_BYTES}")), "{error}");
}

#[test]
fn statistics_show_reported_and_missing_values() {
    let machine = machine(Mood::Willing);
    let table = machine.ctl("statistics");
    assert_eq!(value(&table, "free memory"), "1.0 GiB");
    assert_eq!(value(&table, "OOM kills"), "0");
    assert_eq!(value(&table, "swapped in"), "not reported");
    assert_eq!(machine.json("statistics")["statistics"]["swap_in_bytes"], Value::Null);
    assert_eq!(value(&machine.ctl("statistics-interval 5"), "statistics"), "every 5 s");
    assert_eq!(value(&machine.ctl("statistics-interval 0"), "statistics"), "on demand");
    for bad in [
        "statistics-interval -1",
        "statistics-interval 86401",
        "statistics-interval x",
        "statistics-interval",
    ] {
        machine.error(bad);
    }
    machine.vm.state().mood = Mood::Silent;
    machine.ctl("statistics --max-age 3600000");
    let error = machine.error("statistics");
    assert!(error.contains("within 1000 ms") && error.contains("--max-age"), "{error}");
}

#[test]
fn metrics_are_shown_by_name_and_kind() {
    let machine = machine(Mood::Willing);
    let table = machine.ctl("metrics");
    assert_eq!(value(&table, "balloon_reported_bytes_total"), "2097152 (2.0 MiB)");
    assert_eq!(value(&table, "balloon_errors_total discard_failed"), "3");
    let json = machine.json("metrics");
    let list = json["metrics"].as_array().unwrap();
    let overhead =
        list.iter().find(|sample| sample["name"] == "ebb_overhead_resident_bytes").unwrap();
    assert_eq!(overhead["value"], 5 << 20);
}

#[test]
fn free_pages_are_shown_by_size() {
    let machine = machine(Mood::Willing);
    let table = machine.ctl("free-pages --min-order 9");
    assert_eq!(value(&table, "request"), "7: done");
    assert_eq!(value(&table, "free"), "6.0 MiB of 4.0 GiB");
    assert_eq!(value(&table, "took"), "12.3 ms");
    assert_eq!(value(&table, "named"), "75.0 % of the 8.0 MiB in its statistics (3 ms old)");
    assert_eq!(value(&table, "  of order 9 (2.0 MiB)"), "3 = 6.0 MiB");
    let json = machine.json("free-pages --min-order 9 --timeout-ms 100");
    assert_eq!((&json["status"], &json["min_order"]), (&"done".into(), &9.into()));
    assert_eq!(json["by_order"][0]["block_bytes"], 2 << 20);
    machine.vm.state().mood = Mood::Silent;
    assert_eq!(machine.json("free-pages --timeout-ms 20")["status"], "timeout");
    for bad in ["--min-order 19", "--min-order -1", "--timeout-ms 0", "--timeout-ms 60001", "9"] {
        assert!(parse("s", &format!("free-pages {bad}")).is_err(), "{bad}");
    }
}

#[test]
fn reclaimed_memory_is_shown() {
    let machine = machine(Mood::Willing);
    let text = machine.ctl("reclaim");
    assert_eq!(value(&text, "request"), "8: done");
    assert_eq!(value(&text, "reported"), "6.0 MiB");
    assert_eq!(value(&text, "resident"), "2.0 MiB, before 8.0 MiB");
    assert_eq!(machine.json("reclaim --min-order 0")["min_order"], 0);
    assert!(parse("s", "reclaim --min-order 19").is_err());
}

#[test]
fn parking_is_shown_stage_by_stage() {
    let machine = machine(Mood::Willing);
    let text = machine.ctl("park --keep 20M");
    assert_eq!(value(&text, "report"), "skipped (no such driver)");
    assert_eq!(value(&text, "evict"), "80.0 MiB in 250 ms, ended early (it reads files)");
    assert_eq!(value(&text, "trim"), "0 B in 250 ms, done");
    assert_eq!(value(&text, "resident"), "120.0 MiB, before 200.0 MiB");
    let paused = machine.json("park --pause");
    assert_eq!((&paused["paused"], &paused["snapshot"]), (&json!(true), &json!(null)));
    assert_eq!(paused["stages"][0]["returned_bytes"], 76 << 20);
    assert_eq!(value(&machine.ctl("vm"), "state"), "paused");
    let text = machine.ctl("unpark");
    assert_eq!(value(&text, "parked"), "1 min 1 s ago");
    assert_eq!(value(&text, "swapped in"), "not reported");
    let error = machine.error("park --agent");
    assert!(error.contains("cannot reach the guest"), "{error}");
    for words in ["park --keep much", "park --timeout-ms 99", "park --snapshot"] {
        assert!(parse("s", words).is_err(), "{words}");
    }
}

#[test]
fn refusals_and_dead_sockets_are_explained() {
    let machine_without = machine(Mood::NoBalloon);
    assert_eq!(value(&machine_without.ctl("vm"), "balloon"), "none");
    for words in [
        "balloon",
        "balloon set 1G",
        "statistics",
        "statistics-interval 1",
        "free-pages",
        "reclaim",
    ] {
        let error = machine_without.error(words);
        assert!(
            error.contains("no balloon device") && error.contains("--balloon"),
            "{words}: {error}"
        );
    }
    let paused = machine(Mood::WrongState);
    assert!(paused.error("power-button").contains("paused (resume it)"));
    let folder = tempfile::tempdir().unwrap();
    let missing = folder.path().join("missing");
    let args = parse(missing.to_str().unwrap(), "vm").unwrap();
    let error = execute(args, &mut Vec::new()).unwrap_err().to_string();
    assert!(error.contains("there is no socket") && error.contains("missing"), "{error}");
}

#[test]
fn the_command_line_is_checked() {
    assert!(parse("s", "").is_err());
    assert!(parse("s", "explode").is_err());
    assert!(parse("s", "vm --timeout 0").is_err());
    assert!(parse("s", "balloon set").is_err());
    assert!(parse("s", "vm extra").is_err());
    assert!(parse("s", "--json vm").unwrap().json);
    assert!(parse("s", "vm --json").unwrap().json);
}

#[test]
fn durations_are_readable() {
    for (ms, text) in [
        (0, "0 ms"),
        (999, "999 ms"),
        (1250, "1.2 s"),
        (59_999, "59.9 s"),
        (61_000, "1 min 1 s"),
        (3_660_000, "1 h 1 min"),
        (90_000_000, "1 d 1 h"),
    ] {
        assert_eq!(duration(ms), text);
    }
}

#[test]
fn merging_is_shown_and_changed() {
    let machine = machine(Mood::Willing);
    let table = machine.ctl("merge");
    assert_eq!(value(&table, "state"), "degraded");
    assert_eq!(value(&table, "merged by"), "the monitor, trust domain 'red'");
    assert_eq!(value(&table, "reason"), "the broker is gone");
    assert_eq!(value(&table, "pages of different nodes"), "merged");
    assert_eq!(value(&table, "pace"), "50000 pages/s");
    assert_eq!(value(&table, "pages_sharing"), "2");
    assert_eq!(value(&table, "general_profit"), "-9 B");
    assert!(value(&table, "pages replaced").starts_with("17;"), "{table}");
    assert_eq!(value(&machine.ctl("merge --run unmerge --cpu-percent 5"), "run"), "unmerge");
    assert_eq!(machine.json("merge")["settings"]["run"], "unmerge");
    assert_eq!(value(&machine.ctl("vm"), "shared"), "5.0 MiB");
    for bad in [
        "merge --run maybe",
        "merge --cpu-percent 0",
        "merge --pages-per-second 5 --target-scan-seconds 5",
        "merge --merge-across-nodes yes",
        "merge --max-page-sharing 1",
    ] {
        assert!(parse("socket", bad).is_err(), "{bad}");
    }
    let busy = self::machine(Mood::WrongState);
    assert!(busy.error("merge --merge-across-nodes off").contains("resume it"));
}

#[test]
fn a_snapshot_is_created_with_the_rights_of_the_client() {
    use std::os::unix::fs::PermissionsExt as _;
    let names = |folder: &tempfile::TempDir| std::fs::read_dir(folder.path()).unwrap().count();
    let machine = machine(Mood::Willing);
    let before = names(&machine.folder);
    let path = machine.folder.path().join("a.snapshot");
    let command = format!("snapshot {}", path.display());
    let table = machine.ctl(&command);
    assert_eq!(value(&table, "file"), path.to_str().unwrap());
    assert_eq!(machine.vm.state().descriptors, Some(1));
    assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
    // This double has written nothing to it, so it is not a snapshot.
    assert!(machine.error(&command).contains("is not a snapshot"));
    std::fs::remove_file(&path).unwrap();
    machine.vm.state().mood = Mood::WrongState;
    assert!(machine.error(&command).contains("paused"));
    assert_eq!(names(&machine.folder), before, "nothing is left");
}

#[test]
fn disks_are_shown_and_resized() {
    let machine = machine(Mood::Willing);
    let shown = "/image: 1.0 GiB, raw; 12.0 KiB read, 0 B written, 0 B discarded, 0 errors";
    assert_eq!(value(&machine.ctl("disks"), "disk0"), shown);
    let table = machine.ctl("disks resize disk0");
    assert_eq!(value(&table, "disk0"), shown.replace("1.0 GiB", "2.0 GiB"));
    assert_eq!(machine.json("disks show")["disks"][0]["requests"]["reads"], 3);
    assert!(machine.error("disks resize disk7").contains("device"));
    assert!(machine.error("disks resize disk0 8G").contains("size_bytes"));
    assert!(machine.error("disks resize disk0 2000T").contains("bytes"));
    let image = tempfile::NamedTempFile::new().unwrap();
    let table = machine.ctl(&format!("disks replace disk0 {}", image.path().display()));
    assert_eq!(value(&table, "disk0"), shown.replace("1.0 GiB", "8.0 KiB"));
    assert!(machine.error("disks replace disk0 /none").contains("cannot open /none"));
}

#[test]
fn links_are_shown_and_changed() {
    let machine = machine(Mood::Willing);
    let shown = "tap=tap0, 02:00:00:00:00:01, link up";
    assert_eq!(value(&machine.ctl("net"), "net0"), shown);
    assert_eq!(value(&machine.ctl("net net0 down"), "net0"), shown.replace("up", "down"));
    assert_eq!(machine.json("net net0 up")["devices"][0]["link"], "up");
    assert!(machine.error("net net1 up").contains("no such device"));
    for bad in ["net net0", "net net0 sideways"] {
        assert!(parse("socket", bad).is_err(), "{bad}");
    }
}

#[test]
fn limits_are_shown_and_changed() {
    let machine = machine(Mood::Willing);
    assert_eq!(value(&machine.ctl("limits"), "disk0"), "no limit; 5 requests delayed");
    let table = machine.ctl("limits disk0 --bandwidth 2M --bandwidth-burst 4K --ops 7");
    assert_eq!(
        value(&table, "disk0"),
        "2.0 MiB/s (burst 4.0 KiB), 7 requests/s; 5 requests delayed"
    );
    assert_eq!(machine.vm.state().limits.bandwidth, Some(2 << 20));
    let json = machine.json("limits disk0 --bandwidth 0");
    assert_eq!(json["devices"][0]["bandwidth"], Value::Null);
    assert_eq!(json["devices"][0]["ops"], 7);
    assert!(machine.error("limits disk0").contains("--bandwidth"));
    assert!(machine.error("limits --ops 5").contains("name the device"));
    assert!(machine.error("limits disk0 --bandwidth 2000T").contains("bytes"));
}
