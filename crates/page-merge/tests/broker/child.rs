//! Processes that can be killed: this program run again, as a client or as a broker.

use ebb_page_merge::Nodes;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use ebb_page_merge::StableStore;
use ebb_page_merge::broker::{Broker, BrokerConfig, Limits};
use rustix::process::{Pid, Signal, kill_process};

use crate::cuts::script;
use crate::raw::Raw;
use crate::support::{Member, wait_until};

const ROLE: &str = "EBB_BROKER_TEST_ROLE";
const SOCKET: &str = "EBB_BROKER_TEST_SOCKET";

/// A process that ends when it is dropped.
pub struct Process {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Process {
    pub fn start(role: &str, socket: &Path) -> Self {
        Self::start_with(role, socket, Stdio::piped())
    }

    pub fn start_with(role: &str, socket: &Path, input: Stdio) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child::another_process", "--ignored", "--nocapture", "--quiet"])
            .env(ROLE, role)
            .env(SOCKET, socket)
            .stdin(input)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let input = child.stdin.take();
        let output = BufReader::new(child.stdout.take().unwrap());
        Self { child, input, output }
    }

    /// Waits for a line that begins with `word`; returns the rest of it.
    pub fn wait_for(&mut self, word: &str) -> String {
        let mut line = String::new();
        loop {
            line.clear();
            let length = self.output.read_line(&mut line).unwrap();
            assert!(length > 0, "the process ended before it printed {word}");
            if let Some(rest) = line.trim_end().strip_prefix(word) {
                return rest.trim().to_owned();
            }
        }
    }

    pub fn send_line(&mut self, line: &str) {
        writeln!(self.input.as_mut().unwrap(), "{line}").unwrap();
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// SIGSTOP. The process is stopped when this returns.
    pub fn stop(&self) {
        self.signal(Signal::STOP);
        wait_until("the stop", || {
            let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.id())).unwrap();
            stat.contains(") T ")
        });
    }

    /// SIGCONT.
    pub fn resume(&self) {
        self.signal(Signal::CONT);
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_raw(self.id() as i32).unwrap(), signal).unwrap();
    }

    /// SIGKILL.
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Body of the other process.
#[test]
#[ignore = "the body of other processes"]
fn another_process() {
    let socket = PathBuf::from(std::env::var_os(SOCKET).expect("it is run by other tests"));
    match std::env::var(ROLE).unwrap().as_str() {
        "broker" => broker(socket),
        "poor broker" => crate::descriptors::serve(&socket),
        "sharer" => sharer(&socket),
        "heir" => heir(&socket),
        "churner" => churner(&socket),
        "cutter" => cutter(&socket),
        "machine" => crate::machine::run(&socket),
        other => panic!("the unknown role {other}"),
    }
}

/// Serves until it is killed.
fn broker(path: PathBuf) {
    let mut broker =
        Broker::bind(BrokerConfig { path, domains: Vec::new(), limits: Limits::default() });
    println!("\nlistening");
    let (wait, _stop) = rustix::pipe::pipe().unwrap();
    broker.as_mut().unwrap().run(wait.as_fd()).unwrap();
}

/// Shares pages 0 to 9, making them if necessary, and waits to be killed.
fn sharer(path: &Path) {
    let mut member = Member::join(path, "web", Nodes::Across).unwrap();
    let pages: Vec<u64> = (0..10).collect();
    member.make(&pages);
    member.take_notifications();
    println!("\nsharing");
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    if line.trim() == "drop" {
        // The connection is lost, but the mappings remain.
        let segments = member.segments.clone();
        drop(member);
        println!("\ndropped");
        std::io::stdin().read_line(&mut line).unwrap();
        drop(segments);
    }
}

/// Shares pages 0 to 9 over the connection that is its standard input, and waits to be killed.
fn heir(path: &Path) {
    let connection = std::io::stdin().as_fd().try_clone_to_owned().unwrap();
    let mut member = match Member::join_over(connection, path, "web") {
        Ok(member) => member,
        Err(error) => {
            println!("\nrefused {error}");
            return;
        }
    };
    member.make(&(0..10).collect::<Vec<u64>>());
    member.take_notifications();
    println!("\nsharing");
    loop {
        std::thread::park();
    }
}

/// Makes, shares and releases pages as fast as possible until it is killed.
fn churner(path: &Path) {
    let mut member = Member::join(path, "web", Nodes::Across).unwrap();
    println!("\nchurning");
    for round in 0_u64.. {
        let pages: Vec<u64> = (0..40).map(|page| page * 3 + round % 5).collect();
        let slots = member.publish(&pages);
        for &slot in &slots {
            member.store.shared(slot);
        }
        member.query(round);
        for &slot in slots.iter().skip((round % 7) as usize) {
            member.store.release(slot);
        }
        member.take_notifications();
    }
}

/// Ends a connection after each byte of all messages of a client, all from this one process.
fn cutter(path: &Path) {
    let (bytes, _) = script("web");
    for cut in (0..bytes.len()).filter(|&cut| cut < 200 || cut % 97 == 0 || cut > bytes.len() - 200)
    {
        let mut raw = Raw::connect(path);
        raw.send(&bytes[..cut]);
        // Every third connection ends without reading its answers.
        if cut % 3 != 0 {
            raw.0.shutdown(std::net::Shutdown::Write).unwrap();
            while raw.reply().is_some() {}
        }
    }
    println!("\ncut");
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
}
