//! A run of an experiment from its beginning to its document.

use std::io::{self, Write};
use std::panic::resume_unwind;
use std::sync::mpsc;
use std::thread;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use crate::LabError;
use crate::harness::assets::FoundAssets;
use crate::harness::direct::{self, Selection};
use crate::harness::experiment::{Experiment, SeriesPlan};
use crate::harness::size::RunSize;
use crate::harness::target::{self, Wanted};
use crate::harness::{emulator, host, in_virtual_host};
use crate::report::event::{Collector, Event, Events};
use crate::report::progress::Progress;
use crate::report::results::{Place, Results, SCHEMA_VERSION};

/// The request for a run.
#[derive(Clone)]
pub struct Request {
    /// The experiment.
    pub experiment: &'static Experiment,
    /// Its size.
    pub size: RunSize,
    /// The series.
    pub selection: Selection,
    /// The requested place.
    pub place: Wanted,
}

/// Runs an experiment and shows its progress; returns its document.
///
/// A series that failed has its error in the document ([`Results::first_error`]).
///
/// # Errors
/// The error that prevented the run or its end.
pub fn run(request: &Request, progress: &mut Progress) -> Result<Results, LabError> {
    let begin = Instant::now();
    let started_unix_s =
        SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let machine = host::machine()?;
    let mut selection = request.selection.clone();
    let missing = |plan: &SeriesPlan| if plan.is_emulated() { emulator::missing() } else { None };
    for reason in selection.keep_possible(missing)? {
        progress.say(&reason);
    }
    // Series about the machine run on the machine, unless the virtual host was requested for all.
    let wanted = where_to_run(request)?;
    let (on_machine, with_guests) = match wanted {
        Wanted::VirtualHost => selection.by_emulation(),
        Wanted::Auto | Wanted::Direct => selection.by_subject(),
    };
    let place = if with_guests.plans.is_empty() {
        Place::Direct
    } else {
        target::choose(wanted, progress)?
    };
    let mut collector = Collector::default();
    let Request { experiment, size, .. } = *request;
    let ended = follow(
        |events| {
            direct::run_on_machine(experiment, size, &on_machine, Place::Direct, events)?;
            if with_guests.plans.is_empty() {
                return Ok(());
            }
            if place == Place::VirtualHost {
                let cpus = machine.cpus;
                return in_virtual_host::run(experiment, size, &with_guests, cpus, events);
            }
            let found = FoundAssets::on_this_machine(experiment.needs)?;
            direct::run_guests(experiment, size, with_guests, place, &found.assets, events)
        },
        |event| {
            progress.show(&event);
            collector.take(event);
        },
    );
    if let Err(error) = ended {
        collector.interrupted(error)?;
    }
    (experiment.compare)(&mut collector.series);
    let host = collector.host.ok_or_else(|| LabError::InnerRun {
        status: "it did not describe its host".to_owned(),
        output: String::new(),
    })?;
    Ok(Results {
        schema: SCHEMA_VERSION,
        experiment: experiment.name.to_owned(),
        summary: experiment.summary.to_owned(),
        scale: size.scale,
        parameters: (experiment.parameters)(size.scale),
        ebb_version: env!("CARGO_PKG_VERSION").to_owned(),
        started_unix_s,
        elapsed_s: begin.elapsed().as_secs_f64().round(),
        machine,
        host,
        metrics: (experiment.metrics)(),
        series: collector.series,
        samples: collector.samples,
    })
}

/// The place of the run: also the virtual host if this machine does not meet the requirements of
/// series about the machine.
fn where_to_run(request: &Request) -> Result<Wanted, LabError> {
    let about_machine = request.selection.plans.iter().any(|plan| plan.setup().is_none());
    match (request.place, (request.experiment.machine_lacks)()) {
        (Wanted::Direct, Some(reason)) if about_machine => Err(LabError::MachineLacks(reason)),
        (Wanted::Auto, Some(_)) if about_machine => Ok(Wanted::VirtualHost),
        (place, _) => Ok(place),
    }
}

/// The part of a run inside the virtual host; prints events as JSON, one per line.
///
/// # Errors
/// The error that prevented the run or its end.
pub fn run_inside(request: &Request, mut output: impl Write) -> Result<(), LabError> {
    let (on_machine, with_guests) = request.selection.clone().by_subject();
    let Request { experiment, size, .. } = *request;
    let place = Place::VirtualHost;
    let mut written: io::Result<()> = Ok(());
    follow(
        |events| {
            direct::run_on_machine(experiment, size, &on_machine, place, events)?;
            if with_guests.plans.is_empty() {
                return Ok(());
            }
            let found = FoundAssets::in_virtual_host()?;
            direct::run_guests(experiment, size, with_guests, place, &found.assets, events)
        },
        |event| {
            if written.is_ok() {
                written = write_line(&mut output, &event);
            }
        },
    )?;
    written.map_err(LabError::of_file("/dev/stdout"))
}

fn write_line(output: &mut impl Write, event: &Event) -> io::Result<()> {
    let mut line = serde_json::to_vec(event)?;
    line.push(b'\n');
    output.write_all(&line)?;
    output.flush()
}

/// Runs the work in a separate thread, to which its guests are bound, and forwards its events
/// meanwhile.
fn follow(
    work: impl FnOnce(&Events) -> Result<(), LabError> + Send,
    mut take: impl FnMut(Event),
) -> Result<(), LabError> {
    let (sender, receiver) = mpsc::channel();
    thread::scope(|scope| {
        let worker = scope.spawn(move || work(&Events::new(sender)));
        receiver.iter().for_each(&mut take);
        worker.join().unwrap_or_else(|panic| resume_unwind(panic))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_events_are_received_before_the_work_ends() {
        let mut taken = Vec::new();
        follow(
            |events| {
                (1..=3).for_each(|guest| events.step(guest, "starts"));
                Ok(())
            },
            |event| taken.push(event),
        )
        .unwrap();
        assert_eq!(taken.len(), 3);
    }

    #[test]
    fn an_error_follows_the_events_before_it() {
        let mut taken = 0;
        let outcome = follow(
            |events| {
                events.step(0, "begins");
                Err(LabError::NoDirectKvm("for a test".to_owned()))
            },
            |_| taken += 1,
        );
        assert!(outcome.is_err());
        assert_eq!(taken, 1);
    }

    /// A run about the machine, which needs neither KVM nor the virtual host nor files of guests.
    fn request(place: Wanted) -> Request {
        let experiment = crate::experiments::find("clock").unwrap();
        let plans = experiment.choose(Some(&["raw".to_owned()])).unwrap();
        Request {
            experiment,
            size: RunSize { scale: crate::report::results::Scale::Demo, guests: None },
            selection: Selection { plans, chosen: direct::Chosen::ByName },
            place,
        }
    }

    #[test]
    fn series_about_the_machine_run_on_it() {
        let results = run(&request(Wanted::Auto), &mut Progress::Silent).unwrap();
        assert_eq!(results.host.place, Place::Direct);
        assert_eq!(results.first_error(), None);
        assert_eq!(results.series.len(), 1);
        assert_eq!(results.series[0].metrics["max_jump_ns"], Some(0.0));
    }

    #[test]
    fn inside_the_virtual_host_they_are_reported_as_events() {
        let mut output = Vec::new();
        run_inside(&request(Wanted::Direct), &mut output).unwrap();
        let text = String::from_utf8(output).unwrap();
        let events: Vec<Event> =
            text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert!(matches!(&events[0], Event::Host(host) if host.place == Place::VirtualHost));
        assert!(matches!(&events[1], Event::SeriesBegins { series, .. } if series == "raw"));
        assert!(matches!(events.last(), Some(Event::SeriesEnds(series)) if series.error.is_none()));
    }

    #[test]
    fn events_are_lines_of_json() {
        let mut output = Vec::new();
        let event = Event::Step { guest: 1, text: "starts\nagain".to_owned() };
        write_line(&mut output, &event).unwrap();
        write_line(&mut output, &event).unwrap();
        let text = String::from_utf8(output).unwrap();
        assert_eq!(text.lines().count(), 2);
        assert!(text.lines().all(|line| serde_json::from_str::<Event>(line).unwrap() == event));
    }
}
