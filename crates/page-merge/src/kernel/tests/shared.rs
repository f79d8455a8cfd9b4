//! Several users, their domain, and who cleans up.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use super::*;
use crate::kernel::record::{Record, User};

fn record(copy: &Copy) -> Record {
    let text = fs::read(copy.run_folder().join("ksm-users.json")).unwrap();
    Record::parse(&text).unwrap()
}

/// Another process that uses KSM.
fn other(copy: &Copy, user: User) {
    let mut record = record(copy);
    record.users.push(user);
    fs::write(copy.run_folder().join("ksm-users.json"), record.to_text().unwrap()).unwrap();
}

/// A process that lives as long as this is kept.
struct Living(std::process::Child);

impl Living {
    fn new() -> (Self, User) {
        let child = Command::new("sleep").arg("60").spawn().unwrap();
        let stat = fs::read_to_string(format!("/proc/{}/stat", child.id())).unwrap();
        let start_ticks =
            stat.rsplit_once(')').unwrap().1.split_whitespace().nth(19).unwrap().parse().unwrap();
        let user = User { pid: child.id(), start_ticks };
        (Self(child), user)
    }
}

impl Drop for Living {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn settings_are_put_back_by_the_only_user() {
    let copy = Copy::new();
    let membership = copy.join("a", &merge_apart().with(Knob::PagesToScan, 4000)).unwrap();
    assert_eq!((copy.read("run"), copy.read("merge_across_nodes")), ("1".into(), "0".into()));
    membership.change(&Values::new().with(Knob::SleepMillisecs, 0)).unwrap();
    assert_eq!(copy.read("sleep_millisecs"), "0");
    // Somebody else's business: it stays.
    copy.write("use_zero_pages", "1");
    drop(membership);
    for (name, text) in [
        ("run", "0"),
        ("merge_across_nodes", "1"),
        ("pages_to_scan", "100"),
        ("sleep_millisecs", "20"),
        ("use_zero_pages", "1"),
    ] {
        assert_eq!(copy.read(name), text, "{name}");
    }
    assert_eq!(record(&copy), Record::default());
}

#[test]
fn the_last_user_puts_settings_back() {
    let copy = Copy::new();
    let membership = copy.join("a", &merge_apart()).unwrap();
    let (living, user) = Living::new();
    other(&copy, user);
    assert_eq!(membership.others().unwrap(), 1);
    drop(membership);
    assert_eq!(copy.read("run"), "1", "somebody else uses it");
    assert_eq!(record(&copy).users, [user]);
    assert_eq!(record(&copy).originals.get(Knob::MergeAcrossNodes), Some(1));
    drop(copy.join("a", &Values::new()).unwrap());
    assert_eq!(copy.read("run"), "1", "it still does");
    drop(living);
    drop(copy.join("a", &Values::new()).unwrap());
    assert_eq!((copy.read("run"), copy.read("merge_across_nodes")), ("0".into(), "1".into()));
}

#[test]
fn another_domain_is_refused_while_somebody_is_there() {
    let copy = Copy::new();
    let membership = copy.join("a", &merge_apart()).unwrap();
    let (living, user) = Living::new();
    other(&copy, user);
    drop(membership);
    let error = copy.join("b", &Values::new()).unwrap_err().to_string();
    assert!(
        error.contains("'a'") && error.contains("'b'") && error.contains("merge=owner"),
        "{error}"
    );
    assert!(error.contains(&user.pid.to_string()), "{error}");
    assert_eq!(record(&copy).users, [user], "nobody has joined");
    drop(living);
    let membership = copy.join("b", &Values::new()).unwrap();
    assert_eq!(record(&copy).domain, "b");
    assert_eq!(
        copy.read("merge_across_nodes"),
        "1",
        "it begins with what was there before the others"
    );
    drop(membership);
}

#[test]
fn what_holds_for_all_cannot_be_changed_by_one() {
    let copy = Copy::new();
    let membership = copy.join("a", &Values::new().with(Knob::Run, RUN_MERGE)).unwrap();
    let (_living, user) = Living::new();
    other(&copy, user);
    let error =
        membership.change(&Values::new().with(Knob::MergeAcrossNodes, 0)).unwrap_err().to_string();
    assert!(error.contains("1 other"), "{error}");
    // What it is already may be asked for.
    membership
        .change(&Values::new().with(Knob::MergeAcrossNodes, 1).with(Knob::PagesToScan, 7))
        .unwrap();
    drop(membership);
    let error = copy.join("a", &merge_apart()).unwrap_err().to_string();
    assert!(error.contains("'merge_across_nodes'") && error.contains("run with 1"), "{error}");
    assert_eq!(record(&copy).users, [user]);
}

#[test]
fn a_number_that_was_used_again_is_another_process() {
    let (_living, user) = Living::new();
    let proc = Path::new("/proc");
    assert!(user.is_there(proc));
    assert!(!User { start_ticks: user.start_ticks - 1, ..user }.is_there(proc));
    assert!(User::this(proc).unwrap().is_there(proc));
}

#[test]
fn a_record_that_was_half_replaced_is_read() {
    let whole = Record { domain: "a".repeat(60), ..Record::default() }.to_text().unwrap();
    let new = Record { domain: "b".into(), ..Record::default() };
    let mut text = whole;
    let new_text = new.to_text().unwrap();
    text[..new_text.len()].copy_from_slice(&new_text);
    assert_eq!(Record::parse(&text), Ok(new));
    assert_eq!(Record::parse(b""), Ok(Record::default()));
    assert!(Record::parse(b"{\"domain\": 3}").is_err());
    assert!(Record::parse(b"hello").is_err());
}

/// What the child process of the next test does.
#[test]
#[ignore = "the next test runs it in a process of its own"]
fn in_a_child_process() {
    let folder = PathBuf::from(std::env::var_os("EBB_TEST_KSM_FOLDER").unwrap());
    let ksm = Arc::new(Ksm::open(&folder.join("ksm")).unwrap());
    let users = KsmUsers::open(&folder.join("run")).unwrap();
    let _membership = users.join(ksm, "a", &merge_apart()).unwrap();
    eprintln!("joined");
    std::thread::sleep(Duration::from_secs(60));
}

#[test]
fn a_killed_user_is_noticed_by_the_next() {
    let copy = Copy::new();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "kernel::tests::shared::in_a_child_process", "--ignored", "--nocapture"])
        .env("EBB_TEST_KSM_FOLDER", copy.folder.path())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stderr.take().unwrap()).lines();
    assert!(lines.map_while(Result::ok).any(|line| line.contains("joined")));
    assert_eq!((copy.read("run"), copy.read("merge_across_nodes")), ("1".into(), "0".into()));
    assert!(copy.join("b", &Values::new()).is_err());
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(copy.read("merge_across_nodes"), "0", "nobody has put it back");
    let membership = copy.join("b", &Values::new()).unwrap();
    assert_eq!((copy.read("run"), copy.read("merge_across_nodes")), ("0".into(), "1".into()));
    drop(membership);
    assert_eq!(record(&copy), Record::default());
}
