//! Running the series of an experiment in a virtual host: the same program and code in another
//! place.

use std::path::PathBuf;
use std::time::Duration;

use ebb_virtual_host::cache::Cache;
use ebb_virtual_host::debian::{self, GuestFiles};
use ebb_virtual_host::kernel::is_at_least;
use ebb_virtual_host::{
    Command, ExitStatus, HostConfig, HostFile, HostKernel, Inclusion, NodeConfig, Output,
    VirtualHost,
};

use crate::LabError;
use crate::error::Missing;
use crate::harness::assets::{DEBIAN_KERNEL, memhog_here, module_here};
use crate::harness::console::Tail;
use crate::harness::daemon::{self, Daemon};
use crate::harness::direct::Selection;
use crate::harness::experiment::{Experiment, Needed, SeriesPlan};
use crate::harness::host::MemoryState;
use crate::harness::link::Tools;
use crate::harness::merging::Merging;
use crate::harness::monitor::{MonitorKind, Setup, System};
use crate::harness::size::RunSize;
use crate::report::event::{Event, Events};
use crate::report::results::Scale;

/// Maximum number of processors of a virtual host: the guests run one after another and have one or
/// two.
const MOST_CPUS: u32 = 4;
/// Memory that QEMU's emulator needs in addition to that of the host it runs, mostly for translated
/// code.
const EMULATOR_MIB: u64 = 768;
/// First version of Linux on which a monitor can merge its guest's pages (UFFDIO_MOVE).
pub(crate) const MERGING_SINCE: (u32, u32) = (6, 8);

/// Starts a host of the experiment's shape, runs the series in it and forwards the events.
///
/// # Errors
/// [`LabError::TooLittleMemory`] before anything is started, [`LabError::VirtualHost`],
/// [`LabError::InnerRun`] and [`LabError::InnerProtocol`].
pub fn run(
    experiment: &Experiment,
    size: RunSize,
    selection: &Selection,
    cpus: u32,
    events: &Events,
) -> Result<(), LabError> {
    let mut selection = selection.clone();
    let module = module_here()?;
    let debian = Debian {
        guest: debian::guest_files(&Cache::of_user()),
        work_root: debian::work_root(&Cache::of_user()),
    };
    let missing = |plan: &SeriesPlan| {
        let setup = plan.setup()?;
        debian.missing(setup).or_else(|| setup.missing_in_guest(module))
    };
    for reason in selection.keep_possible(missing)? {
        events.step(0, reason);
    }
    let same_host = |one: &SeriesPlan, other: &SeriesPlan| {
        (experiment.host)(size.scale, one.name) == (experiment.host)(size.scale, other.name)
    };
    for plans in selection.plans.chunk_by(same_host) {
        let selection = Selection { plans: plans.to_vec(), chosen: selection.chosen };
        run_in_one(experiment, size, &selection, cpus, &debian, events)?;
    }
    Ok(())
}

/// What was made for Debian guests.
struct Debian {
    guest: Option<GuestFiles>,
    work_root: Option<PathBuf>,
}

impl Debian {
    /// What guests of this setup lack.
    fn missing(&self, setup: &Setup) -> Option<Missing> {
        match setup.system {
            System::DebianWithSsh if self.guest.is_none() => Some(Missing::Debian),
            system if system.has_work_root() && self.work_root.is_none() => Some(Missing::Work),
            _ => None,
        }
    }
}

/// Runs series that share a host.
fn run_in_one(
    experiment: &Experiment,
    size: RunSize,
    selection: &Selection,
    cpus: u32,
    debian: &Debian,
    events: &Events,
) -> Result<(), LabError> {
    let Some(first) = selection.plans.first() else { return Ok(()) };
    let shape = (experiment.host)(size.scale, first.name);
    let needed_mib = shape.memory_mib + EMULATOR_MIB;
    let available_mib = MemoryState::read()?.available_kib / 1024;
    if available_mib < needed_mib {
        let what = format!("{} at {} scale in the virtual host", experiment.name, size.scale);
        return Err(LabError::TooLittleMemory { what, needed_mib, available_mib });
    }
    let nodes = if shape.nodes > 1 { format!(", {} nodes", shape.nodes) } else { String::new() };
    events.step(
        0,
        format!(
            "starts the virtual host: {} MiB, {} MiB swap{nodes}",
            shape.memory_mib, shape.swap_mib
        ),
    );
    let any =
        |is: fn(&Setup) -> bool| selection.plans.iter().any(|plan| plan.setup().is_some_and(is));
    let wants_qemu = any(|setup| setup.monitor == MonitorKind::Qemu);
    let merges = experiment.needs.merging || any(|setup| setup.merging != Merging::Off);
    let guest =
        debian.guest.as_ref().filter(|_| any(|setup| setup.system == System::DebianWithSsh));
    let works = |plan: &&SeriesPlan| plan.setup().is_some_and(|setup| setup.system.has_work_root());
    let disks = guest.map(|files| &files.root).into_iter();
    // Each writes to its own.
    let of_works = selection.plans.iter().filter(works).filter_map(|_| debian.work_root.as_ref());
    let kernel = |files: &GuestFiles| HostFile {
        source: files.kernel.clone(),
        target: DEBIAN_KERNEL.into(),
        mode: None,
    };
    let needs = experiment.needs;
    let mut files: Vec<HostFile> = guest.map(kernel).into_iter().collect();
    if needs.daemon {
        let (source, target) = (Daemon::program()?, daemon::IN_VIRTUAL_HOST.into());
        files.push(HostFile { source, target, mode: None });
    }
    let mut programs = Needed::paths(needs.programs)?;
    if needs.network {
        let tools = Tools::find()?;
        programs.extend([tools.ip, tools.tc]);
    }
    let owned = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect();
    let cpus = cpus.clamp(1, MOST_CPUS);
    let host = VirtualHost::start(&HostConfig {
        memory_mib: shape.memory_mib,
        swap_mib: shape.swap_mib,
        cpus,
        nodes: match shape.nodes {
            0 | 1 => Vec::new(),
            nodes => NodeConfig::even(nodes, shape.memory_mib, cpus),
        },
        host_kernel: if merges { HostKernel::Newest } else { HostKernel::OfGuests },
        time_limit: time_limit(size.scale),
        memhog: memhog_here(experiment.needs),
        programs,
        modules: owned(needs.modules),
        files,
        disks: disks.chain(of_works).cloned().collect(),
        guest_modules: owned(needs.guest_modules),
        guest_programs: Needed::paths(needs.guest_programs)?,
        qemu: if wants_qemu { Inclusion::Included } else { Inclusion::Excluded },
        ..HostConfig::default()
    })?;
    let (major, minor) = MERGING_SINCE;
    let release = &host.hello().kernel;
    if merges && !is_at_least(release, major, minor) {
        return Err(LabError::OldKernel { release: release.clone() });
    }
    let mut inner = InnerRun::new(events);
    let status =
        host.run(&command(experiment, size, selection), &mut |output| inner.take(output))?;
    inner.finish(status)?;
    host.shutdown()?;
    Ok(())
}

/// Time limit for a run that hangs.
fn time_limit(scale: Scale) -> Duration {
    match scale {
        Scale::Demo => Duration::from_secs(30 * 60),
        Scale::Full => Duration::from_secs(6 * 3600),
    }
}

/// The command that runs the same experiment inside.
fn command(experiment: &Experiment, size: RunSize, selection: &Selection) -> Command {
    let series: Vec<&str> = selection.plans.iter().map(|plan| plan.name).collect();
    let command = Command::new("/init")
        .args(["run", experiment.name, "--where", "direct", "--json-events"])
        .args(["--scale", size.scale.name(), "--series", &series.join(",")]);
    match size.guests {
        None => command,
        Some(guests) => command.arg("--guests").arg(guests.to_string()),
    }
}

/// Processes the output of the run inside: events line by line, and messages for the case of a
/// failure.
struct InnerRun<'a> {
    events: &'a Events,
    stdout: Vec<u8>,
    stderr: Vec<u8>,
    messages: Tail,
    /// The first line that was not an event.
    failure: Option<LabError>,
}

impl<'a> InnerRun<'a> {
    fn new(events: &'a Events) -> Self {
        Self {
            events,
            stdout: Vec::new(),
            stderr: Vec::new(),
            messages: Tail::default(),
            failure: None,
        }
    }

    fn take(&mut self, output: Output<'_>) {
        match output {
            Output::Stdout(bytes) => {
                self.stdout.extend_from_slice(bytes);
                for line in whole_lines(&mut self.stdout) {
                    self.event(line);
                }
            }
            Output::Stderr(bytes) => {
                self.stderr.extend_from_slice(bytes);
                for line in whole_lines(&mut self.stderr) {
                    tracing::debug!("inside: {line}");
                    self.messages.push(line);
                }
            }
        }
    }

    fn event(&mut self, line: String) {
        match serde_json::from_str::<Event>(&line) {
            Ok(event) => self.events.send(event),
            Err(cause) if self.failure.is_none() => {
                self.failure = Some(LabError::InnerProtocol { line, cause });
            }
            Err(_) => {}
        }
    }

    fn finish(mut self, status: ExitStatus) -> Result<(), LabError> {
        let rest = String::from_utf8_lossy(&self.stderr).into_owned();
        self.messages.push(rest);
        match (status, self.failure) {
            (ExitStatus::Code(0), None) => Ok(()),
            (ExitStatus::Code(0), Some(failure)) => Err(failure),
            (ExitStatus::Code(code), _) => {
                Err(inner_failed(format!("exit code {code}"), &self.messages))
            }
            (ExitStatus::Signal(signal), _) => {
                Err(inner_failed(format!("signal {signal}"), &self.messages))
            }
        }
    }
}

fn inner_failed(status: String, messages: &Tail) -> LabError {
    LabError::InnerRun { status, output: messages.show("its last messages") }
}

/// Removes the complete lines from a buffer.
fn whole_lines(buffer: &mut Vec<u8>) -> Vec<String> {
    let Some(end) = buffer.iter().rposition(|&byte| byte == b'\n') else { return Vec::new() };
    let rest = buffer.split_off(end + 1);
    let whole = std::mem::replace(buffer, rest);
    String::from_utf8_lossy(&whole).lines().map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiments;
    use crate::harness::direct::Chosen;
    use std::sync::mpsc;

    fn step(text: &str) -> Event {
        Event::Step { guest: 1, text: text.to_owned() }
    }

    #[test]
    fn events_arrive_for_any_chunks_of_the_output() {
        let lines: String = ["starts", "runs"]
            .map(|text| serde_json::to_string(&step(text)).unwrap() + "\n")
            .concat();
        for size in [1, 7, lines.len()] {
            let (sender, receiver) = mpsc::channel();
            let events = Events::new(sender);
            let mut inner = InnerRun::new(&events);
            lines.as_bytes().chunks(size).for_each(|bytes| inner.take(Output::Stdout(bytes)));
            inner.finish(ExitStatus::Code(0)).unwrap();
            drop(events);
            assert_eq!(receiver.iter().collect::<Vec<_>>(), [step("starts"), step("runs")]);
        }
    }

    #[test]
    fn a_failure_inside_is_reported_with_its_last_messages() {
        let (sender, _receiver) = mpsc::channel();
        let events = Events::new(sender);
        let mut inner = InnerRun::new(&events);
        inner.take(Output::Stderr(b"Error: no KVM\nwithout end"));
        let message = inner.finish(ExitStatus::Code(1)).unwrap_err().to_string();
        assert!(message.contains("exit code 1"), "{message}");
        assert!(message.contains("    Error: no KVM\n    without end"), "{message}");
    }

    #[test]
    fn a_line_that_is_not_an_event_is_an_error_even_if_the_run_succeeds() {
        let (sender, _receiver) = mpsc::channel();
        let events = Events::new(sender);
        let mut inner = InnerRun::new(&events);
        inner.take(Output::Stdout(b"hello\n"));
        let message = inner.finish(ExitStatus::Code(0)).unwrap_err().to_string();
        assert!(message.ends_with("hello"), "{message}");
    }

    #[test]
    fn the_command_inside_is_this_program_with_the_same_series() {
        let experiment = experiments::find("memhog").unwrap();
        let plans = experiment.choose(None).unwrap();
        let selection = Selection { plans, chosen: Chosen::ByDefault };
        let words = "run memhog --where direct --json-events --scale full --series \
                     no-reporting,reporting,bitmap,percpu,qemu-reporting";
        let expected = Command::new("/init").args(words.split(' '));
        let size = RunSize { scale: Scale::Full, guests: None };
        assert_eq!(command(experiment, size, &selection), expected);
        let size = RunSize { guests: Some(2), ..size };
        assert_eq!(command(experiment, size, &selection), expected.args(["--guests", "2"]));
    }
}
