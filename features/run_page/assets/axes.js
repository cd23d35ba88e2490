// What an axis spans and how its numbers are written.

// Where points are fewer, each is as good as another.
const LEAST_FOR_OUTLIERS = 20;
// An axis reaches so many times the middle nine tenths' width beyond them.
const REACH = 3;
// More than that are no outliers.
const MOST_OUTLIERS = 0.05;

// [low, high] that most values lie within; a few far beyond it, such as one exploded step, are left
// out, and counted. A value beside nothing but equal ones is the picture, and no outlier.
function robustRange(values) {
  const finite = values.filter((value) => value !== null && Number.isFinite(value))
    .sort((one, other) => one - other);
  if (!finite.length) {
    return { low: null, high: null, beyond: 0 };
  }
  const all = { low: finite[0], high: finite[finite.length - 1], beyond: 0 };
  if (finite.length < LEAST_FOR_OUTLIERS) {
    return all;
  }
  const at = (share) => finite[Math.round(share * (finite.length - 1))];
  const width = at(0.95) - at(0.05);
  if (width <= 0) {
    return all;
  }
  const kept = finite.filter((value) =>
    value >= at(0.05) - REACH * width && value <= at(0.95) + REACH * width);
  const beyond = finite.length - kept.length;
  if (!beyond || beyond > MOST_OUTLIERS * finite.length) {
    return all;
  }
  return { low: kept[0], high: kept[kept.length - 1], beyond };
}

// The numbers of an axis, in one form: all with as many digits behind the point, or all with one
// power of ten.
function axisNumbers(splits) {
  const known = splits.filter((value) => value !== null);
  if (!known.length) {
    return splits.map(() => "");
  }
  const sizes = known.map(Math.abs);
  const largest = Math.max(...sizes);
  let gap = largest || 1;
  known.forEach((value, place) => {
    const next = place ? Math.abs(value - known[place - 1]) : 0;
    gap = next > 0 ? Math.min(gap, next) : gap;
  });
  const isPower = largest > 0 && (largest < 1e-3 || largest >= 1e6);
  const power = isPower ? Math.floor(Math.log10(largest)) : 0;
  const unit = 10 ** power;
  const digits = digitsOfGap(gap / unit);
  return splits.map((value) => {
    if (value === null) {
      return "";
    }
    // No -0.0.
    const number = (Math.round((value / unit) * 10 ** digits) / 10 ** digits || 0).toFixed(digits);
    return isPower && value !== 0 ? `${number}e${power}` : number;
  });
}

// The digits behind the point that tell numbers apart which lie so far from each other.
function digitsOfGap(gap) {
  let digits = 0;
  while (digits < 6 && Math.abs(gap * 10 ** digits - Math.round(gap * 10 ** digits)) > 1e-6) {
    digits += 1;
  }
  return digits;
}
