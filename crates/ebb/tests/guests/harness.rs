//! Runs a test with a time limit and its own directory, and ends all its guests in any case.

use std::cell::RefCell;
use std::fmt::Write as _;
use std::io;
use std::panic::{self, AssertUnwindSafe};
use std::path::PathBuf;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, Once, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use ebb_virtual_host::kernel::is_at_least;
use libtest_mimic::Trial;
use serde::{Deserialize, Serialize};

use crate::guest::Handle;
use crate::trace::{HOST_FAILED, Trace};

/// Time limit for the end of a test after its guests were killed.
const GRACE: Duration = Duration::from_secs(5);
/// Lines of a failure's message that are printed at once.
const FIRST_LINES: usize = 3;
/// Shortest and longest interval of checks for an awaited state. They cost the processor time that
/// the guest needs to reach it.
const POLL: [Duration; 2] = [Duration::from_millis(20), Duration::from_millis(500)];

/// A test with its time limit.
pub struct Test {
    name: &'static str,
    limit_s: u64,
    needs: Needs,
    body: fn(&Scene),
}

/// Requirements of a test on the host's kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Needs {
    /// Debian 12's kernel is sufficient.
    AnyKernel,
    /// Linux 6.8 or newer, with which the monitor can merge pages of its memory.
    Merging,
}

/// The machine on which the guests run.
#[derive(Debug, Clone)]
pub enum Machine {
    /// A processor with hardware virtualization.
    Real,
    /// An emulated processor, with a trace of KVM if the kernel supports it.
    Emulated(Option<Trace>),
}

/// Programs and files for guests.
#[derive(Debug, Clone)]
pub struct World {
    /// The machine on which they run.
    pub machine: Machine,
    /// The `ebb` program.
    pub ebb: PathBuf,
    /// The same with a planted bug, if it was built.
    pub planted_ebb: PathBuf,
    /// Debian's kernel as bzImage.
    pub bzimage: PathBuf,
    /// The same kernel as ELF.
    pub vmlinux: PathBuf,
    /// Initramfs with the agent, the test modules and busybox.
    pub initrd: PathBuf,
    /// The same with this program as `/bin/guests`, and the agent for `ebb exec`.
    pub hostile_initrd: PathBuf,
    /// Busybox on the host.
    pub busybox: PathBuf,
}

/// Environment of one test.
pub struct Scene {
    /// The files.
    pub world: World,
    directory: tempfile::TempDir,
    guests: Arc<Guests>,
}

/// The guests of a test, and their reports for its failure.
#[derive(Default)]
pub struct Guests {
    handles: Mutex<Vec<Handle>>,
    report: Mutex<String>,
}

impl Guests {
    /// Registers a guest, which is ended with the test.
    pub fn add(&self, handle: Handle) {
        self.handles.lock().unwrap_or_else(PoisonError::into_inner).push(handle);
    }

    /// Adds to the report of the failure.
    pub fn report(&self, text: &str) {
        self.report.lock().unwrap_or_else(PoisonError::into_inner).push_str(text);
    }

    fn take_report(&self) -> String {
        std::mem::take(&mut *self.report.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Kills the running guests and reports their state.
    fn end_all(&self) -> String {
        let mut text = String::new();
        for handle in self.handles.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            text.push_str(&handle.diagnose());
            handle.kill();
        }
        text
    }

    /// The vCPU on which a guest has ended with a triple fault that its test did not request.
    fn unasked_triple_fault(&self) -> Option<u32> {
        let handles = self.handles.lock().unwrap_or_else(PoisonError::into_inner);
        handles.iter().find_map(Handle::unasked_triple_fault)
    }
}

impl Scene {
    /// A path in the test's own directory.
    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// The guests of this test.
    pub fn guests(&self) -> Arc<Guests> {
        self.guests.clone()
    }
}

thread_local! {
    static PANIC: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Stores a panic's message for the result of its test, instead of printing it between others.
fn keep_panics() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        panic::set_hook(Box::new(|info| {
            let text = info.to_string();
            // The first panic is the cause; one in a destructor is a consequence.
            PANIC.with(|kept| kept.borrow_mut().get_or_insert(text).truncate(16 << 10));
        }));
    });
}

impl Test {
    /// A test with a time limit of `limit_s` seconds, or several times that in a long run.
    pub const fn new(name: &'static str, limit_s: u64, body: fn(&Scene)) -> Self {
        Self { name, limit_s, needs: Needs::AnyKernel, body }
    }

    /// The same test with the requirement [`Needs::Merging`].
    pub const fn merging(self) -> Self {
        Self { needs: Needs::Merging, ..self }
    }

    /// The test for libtest-mimic; without a world it can only be listed.
    pub fn trial(&self, world: Option<World>) -> Trial {
        let (name, body) = (self.name, self.body);
        let limit = limit(self.limit_s) * counts(1, LONG_LIMITS);
        let needs = self.needs;
        Trial::test(name, move || {
            let world = world.ok_or("no environment for guests")?;
            needs.check()?;
            let started = Instant::now();
            let result = run(body, limit, world.clone());
            let mut outcome = TestResult {
                name: name.to_owned(),
                seconds: started.elapsed().as_secs(),
                end: TestEnd::Passed,
            };
            let result = result.map_err(|Failure { mut message, triple_fault }| {
                if let (Some(vcpu), Machine::Emulated(Some(trace))) = (triple_fault, &world.machine)
                {
                    message.push_str(&trace.before_triple_fault(vcpu));
                }
                let host_failed = triple_fault.is_some() || message.contains(HOST_FAILED);
                outcome.end = if host_failed && !message.contains(WRONG_CONTENT) {
                    TestEnd::HostFailed
                } else {
                    TestEnd::Failed
                };
                // The full message follows when all tests have ended, if that is reached.
                let first: Vec<_> = message.lines().take(FIRST_LINES).collect();
                eprintln!("{name}: {}", first.join("\n"));
                message.into()
            });
            RESULTS.lock().unwrap_or_else(PoisonError::into_inner).push(outcome);
            result
        })
    }

    /// Its name.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Its requirements on the kernel.
    pub fn needs(&self) -> Needs {
        self.needs
    }
}

impl Needs {
    /// The requirements of the test with this name.
    pub fn of(name: &str) -> Self {
        crate::tests().find(|test| test.name() == name).map_or(Self::AnyKernel, Test::needs)
    }

    /// Checks that the kernel meets the requirement. Otherwise the test fails instead of being
    /// skipped, so that the missing coverage is noticed.
    fn check(self) -> Result<(), String> {
        let release = rustix::system::uname().release().to_string_lossy().into_owned();
        if self == Self::AnyKernel || is_at_least(&release, 6, 8) {
            return Ok(());
        }
        Err(format!(
            "this test merges pages in the monitor's memory, which needs Linux 6.8 or newer; this \
             is {release}. scripts/install-deps.sh unpacks a newer kernel for virtual hosts from \
             Debian 12's backports (EBB_BACKPORTS selects another mirror), or EBB_HOST_KERNEL \
             names one"
        ))
    }
}

/// Set to `long` for the full counts (`make test-long`), to `debug` for guests whose kernel checks
/// itself (`make module-debug`).
pub const RUN_VARIABLE: &str = "EBB_TESTS";
/// Factor of the tests' time limits in a long run.
const LONG_LIMITS: u32 = 6;
/// Factor of all time limits: machines that others use as well may be several times slower than an
/// idle one. Limits only end what hangs.
const LIMITS: u32 = 3;
/// The same with a kernel that checks itself.
const DEBUG_LIMITS: u32 = 8;
/// Additional memory of guests with such a kernel.
const DEBUG_MIB: u64 = 256;

fn is_run(kind: &str) -> bool {
    std::env::var(RUN_VARIABLE).is_ok_and(|run| run == kind)
}

/// A time limit that guests on an idle machine meet, for any machine.
pub fn limit(seconds: u64) -> Duration {
    Duration::from_secs(seconds) * if is_run("debug") { DEBUG_LIMITS } else { LIMITS }
}

/// Memory that guests need in addition to what a test gives them.
pub fn additional_mib() -> u64 {
    if is_run("debug") { DEBUG_MIB } else { 0 }
}

/// Whether this is a long run.
pub fn is_long() -> bool {
    is_run("long")
}

/// A count, size or time of a test: `short` in an ordinary run, which covers every mechanism;
/// `long` in a long one.
pub fn counts<T>(short: T, long: T) -> T {
    if is_long() { long } else { short }
}

/// Outcome of a test.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TestEnd {
    /// The test passed.
    Passed,
    /// The test failed with a sign that the emulated host was at fault: a guest that ended with a
    /// triple fault which the test did not request, or [`HOST_FAILED`] in its report.
    HostFailed,
    /// The test failed without such a sign, or with [`WRONG_CONTENT`].
    Failed,
}

/// Result of a test.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct TestResult {
    /// Name of the test.
    pub name: String,
    /// Duration.
    pub seconds: u64,
    /// Outcome.
    pub end: TestEnd,
}

/// Results of the tests so far.
static RESULTS: Mutex<Vec<TestResult>> = Mutex::new(Vec::new());

/// Results of the tests so far.
pub fn results() -> Vec<TestResult> {
    RESULTS.lock().unwrap_or_else(PoisonError::into_inner).clone()
}

/// The `count` slowest tests.
pub fn slowest(results: &[TestResult], count: usize) -> String {
    let mut results: Vec<_> = results.iter().collect();
    results.sort_by_key(|result| std::cmp::Reverse(result.seconds));
    let words: Vec<_> = results
        .iter()
        .take(count)
        .map(|result| format!("{} {} s", result.name, result.seconds))
        .collect();
    words.join(", ")
}

/// Message of the failure of a test whose guest's memory had wrong content. Such a test is not
/// repeated.
pub const WRONG_CONTENT: &str = "pages have content that was not written to them";

/// Reason of a test's failure.
struct Failure {
    message: String,
    /// The vCPU on which a guest has ended with a triple fault that the test did not request.
    triple_fault: Option<u32>,
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self { message: error.to_string(), triple_fault: None }
    }
}

fn run(body: fn(&Scene), limit: Duration, world: World) -> Result<(), Failure> {
    keep_panics();
    crate::trace::standstill();
    let guests = Arc::new(Guests::default());
    let scene = Scene {
        world,
        directory: tempfile::Builder::new().prefix("ebb-").tempdir()?,
        guests: guests.clone(),
    };
    let (sender, end) = mpsc::channel();
    let thread = thread::Builder::new().spawn(move || {
        let result = panic::catch_unwind(AssertUnwindSafe(|| body(&scene)));
        let panic = PANIC.with(|kept| kept.borrow_mut().take());
        drop(scene);
        let _ = sender.send(
            result.map_err(|_| panic.unwrap_or_else(|| "a panic without a message".to_owned())),
        );
    })?;
    let mut message = match end.recv_timeout(limit) {
        Ok(Ok(())) => {
            let _ = thread.join();
            return Ok(());
        }
        Ok(Err(panic)) => panic,
        Err(RecvTimeoutError::Disconnected) => {
            "the test's thread has ended without a result".to_owned()
        }
        Err(RecvTimeoutError::Timeout) => {
            let mut message = format!("not at its end after {} s", limit.as_secs());
            message.push_str(&guests.end_all());
            if let Ok(Err(panic)) = end.recv_timeout(GRACE) {
                let _ = write!(message, "\nthen: {panic}");
            }
            message
        }
    };
    message.push_str(&guests.take_report());
    message.push_str(&crate::trace::standstill());
    guests.end_all();
    Err(Failure { message, triple_fault: guests.unasked_triple_fault() })
}

/// Calls `check` until it returns `Ok`; fails with its last error after `limit_s` seconds.
#[track_caller]
pub fn eventually<T>(what: &str, limit_s: u64, mut check: impl FnMut() -> Result<T, String>) -> T {
    let started = Instant::now();
    loop {
        match check() {
            Ok(found) => return found,
            Err(state) => {
                let limit = limit(limit_s);
                assert!(started.elapsed() < limit, "{what}: not within {limit:?}: {state}");
            }
        }
        thread::sleep((started.elapsed() / 6).clamp(POLL[0], POLL[1]));
    }
}

/// `Ok` if `condition` holds, otherwise the text of `state`.
pub fn when(condition: bool, state: impl FnOnce() -> String) -> Result<(), String> {
    if condition { Ok(()) } else { Err(state()) }
}
