//! Throughput of the broker over a real socket, the longest wait of other clients, and the broker's
//! memory per stable page.
//!
//! The broker is this program run again in its own process, so that its memory is separate from
//! that of its clients. The benchmark takes its own measurements instead of using criterion, since
//! most steps can be done only once.

use ebb_page_merge::Nodes;
use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use ebb_guest_ram::StableSlot;
use ebb_page_merge::broker::{
    Broker, BrokerConfig, BrokerStore, Limits, MemberConfig, SegmentUser, ask_status,
};
use ebb_page_merge::{Answer, Node, PageHash, StableStore};

type Failure = Box<dyn std::error::Error>;

/// Set for the broker's process: the path of its socket.
const SOCKET: &str = "EBB_BENCH_BROKER";
const PAGE: usize = 4096;
/// Hashes per query.
const BATCH: u64 = 1024;
/// Pages per publication.
const PUBLISHED: u64 = 64;
const LONG: Duration = Duration::from_secs(120);

/// Number of stable pages to make, and of hashes to remember.
struct Size {
    pages: u64,
    hashes: u64,
}

/// No contents are compared, so nothing is mapped.
#[derive(Default)]
struct Unmapped(u32);

impl SegmentUser for Unmapped {
    fn next_number(&mut self) -> Option<u32> {
        self.0 += 1;
        Some(self.0)
    }
    fn add(&mut self, _: u32, _: File) -> io::Result<()> {
        Ok(())
    }
    fn remove(&mut self, _: u32) {}
}

type Member = BrokerStore<Unmapped>;

struct Process {
    child: Child,
    path: PathBuf,
}

impl Process {
    fn start(folder: &Path) -> Result<Self, Failure> {
        let path = folder.join("broker");
        let mut child = Command::new(std::env::current_exe()?)
            .env(SOCKET, &path)
            .stdout(Stdio::piped())
            .spawn()?;
        if let Some(output) = child.stdout.take() {
            BufReader::new(output).read_line(&mut String::new())?;
        }
        Ok(Self { child, path })
    }

    fn member(&self) -> Result<Member, Failure> {
        let mut config = MemberConfig::new(self.path.clone(), "bench".parse()?, Nodes::Across);
        config.time_limit = LONG;
        Ok(BrokerStore::connect(&config, Unmapped::default())?)
    }

    /// Private memory of the broker, without the stable pages.
    fn own_bytes(&self) -> Result<u64, Failure> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id()))?;
        let line =
            status.lines().find_map(|line| line.strip_prefix("RssAnon:")).ok_or("no RssAnon")?;
        Ok(line.trim().trim_end_matches(" kB").parse::<u64>()? * 1024)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // The broker serves until it is killed.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn serve(path: PathBuf) -> Result<(), Failure> {
    let limits = Limits { domain_pages: 1 << 24, published_pages: 1 << 24, ..Limits::default() };
    let mut broker = Broker::bind(BrokerConfig { path, domains: Vec::new(), limits })?;
    println!("listening");
    let (never, _held) = rustix::pipe::pipe()?;
    Ok(broker.run(never.as_fd())?)
}

/// Arbitrary hashes, like those of pages.
fn hashes(first: u64, count: u64) -> Vec<PageHash> {
    (first..first + count)
        .map(|number| PageHash::new(number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 7))
        .collect()
}

fn contents(first: u64, count: u64) -> Vec<u8> {
    let mut contents = vec![0x5a; count as usize * PAGE];
    for (page, number) in contents.chunks_exact_mut(PAGE).zip(first..) {
        page[..8].copy_from_slice(&number.to_le_bytes());
    }
    contents
}

fn rate(what: &str, count: u64, work: impl FnOnce() -> Result<(), Failure>) -> Result<(), Failure> {
    let begin = Instant::now();
    work()?;
    println!("{what:<60} {:>12.0} per second", count as f64 / begin.elapsed().as_secs_f64());
    Ok(())
}

/// Measures the time of one query while the broker does a large piece of work.
fn wait(what: &str, member: &mut Member, work: impl FnOnce()) -> Result<(), Failure> {
    work();
    let begin = Instant::now();
    ask(member, &hashes(1, 1))?;
    println!("{what:<60} {:>12.1} ms", begin.elapsed().as_secs_f64() * 1000.0);
    Ok(())
}

fn ask(member: &mut Member, hashes: &[PageHash]) -> Result<(), Failure> {
    let mut answers = Vec::with_capacity(hashes.len());
    member.query(Node::ANY, hashes, &mut answers)?;
    for answer in answers {
        if let Answer::Stable(slot) = answer {
            member.unused(slot);
        }
    }
    Ok(())
}

fn publish(member: &mut Member, first: u64, slots: &mut Vec<StableSlot>) -> Result<(), Failure> {
    let before = slots.len();
    // The broker computes its own hashes.
    member.publish(Node::ANY, &hashes(first, PUBLISHED), &contents(first, PUBLISHED), slots)?;
    for &slot in &slots[before..] {
        member.shared(slot);
    }
    Ok(())
}

fn measure(size: &Size) -> Result<(), Failure> {
    let folder = tempfile::tempdir()?;
    let broker = Process::start(folder.path())?;
    let (mut first, mut second) = (broker.member()?, broker.member()?);
    let empty = broker.own_bytes()?;
    println!("{} stable pages, {} hashes", size.pages, size.hashes);

    let mut slots = Vec::new();
    rate("publish: pages, 64 at once", size.pages, || {
        (0..size.pages / PUBLISHED)
            .try_for_each(|batch| publish(&mut first, batch * PUBLISHED, &mut slots))
    })?;
    first.flush();
    ask(&mut first, &hashes(1, 1))?;
    let with_pages = broker.own_bytes()?;
    println!("{:<60} {:>12.0} bytes", "memory of the broker per stable page with one sharer", {
        with_pages.saturating_sub(empty) as f64 / size.pages as f64
    });

    let hasher = ebb_page_merge::PageHasher::new(&first.secret());
    let known: Vec<PageHash> =
        contents(0, BATCH).chunks_exact(PAGE).map(|page| hasher.hash(page)).collect();
    rate("query: hashes with a stable page, 1024 at once, returned", 200 * BATCH, || {
        (0..200).try_for_each(|_| ask(&mut second, &known))
    })?;
    rate("query: one hash with a stable page", 20_000, || {
        (0..20_000).try_for_each(|number: usize| ask(&mut second, &known[number % 1024..][..1]))
    })?;
    rate("query: hashes of no client, 1024 at once", size.hashes, || {
        (0..size.hashes / BATCH)
            .try_for_each(|batch| ask(&mut second, &hashes(batch * BATCH, BATCH)))
    })?;
    println!("{:<60} {:>12.0} bytes", "memory of the broker per remembered hash", {
        broker.own_bytes()?.saturating_sub(with_pages) as f64 / size.hashes as f64
    });

    let mut worst = Duration::ZERO;
    for batch in 0..size.hashes / BATCH {
        let begin = Instant::now();
        ask(&mut first, &hashes(batch * BATCH + (1 << 40), BATCH))?;
        worst = worst.max(begin.elapsed());
    }
    println!(
        "{:<60} {:>12.1} ms",
        "longest answer to 1024 hashes while tables grow",
        worst.as_secs_f64() * 1000.0
    );
    let mut third = broker.member()?;
    wait("a query during a status report", &mut third, || {
        let path = broker.path.clone();
        let _state = std::thread::spawn(move || ask_status(&path, LONG));
        std::thread::sleep(Duration::from_micros(500));
    })?;
    wait("a query while a client with many hashes leaves", &mut third, || drop(second))?;
    wait("a query while all shares are released", &mut third, || {
        for &slot in &slots {
            first.release(slot);
        }
    })?;
    Ok(())
}

fn main() -> Result<(), Failure> {
    if let Some(path) = std::env::var_os(SOCKET) {
        return serve(PathBuf::from(path));
    }
    let is_test = std::env::args().any(|argument| argument == "--test");
    let size = if is_test {
        Size { pages: 1 << 10, hashes: 1 << 12 }
    } else {
        Size { pages: 1 << 18, hashes: 1 << 22 }
    };
    measure(&size)
}
